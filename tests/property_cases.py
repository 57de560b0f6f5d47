"""The configurations that the property test runs over, and the compiled steps of each, shared by all its sequences."""

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jkv
from jkv.testing import DSACodec, FP4Codec, MHAModel, MLAModel

SIZE, PAGE, LAYERS, N = 8, 4, 2, 4
LAYOUTS = ("tuple", "stacked")
CONTEXTS = ("mesh", "shard_map", "local")
MESHES = tuple((c, t) for c in (1, 2, 3, 4, 8) for t in (1, 2) if c * t <= 8)
CASES_PER_CELL = 7
CONSTANT_SCALES = {"k_scale": 0.3, "v_scale": 0.07}
FP8 = ("float8_e4m3fn", "float8_e5m2")
# (head_num, head_dim, v_head_dim) and (kv_lora_rank, qk_rope_head_dim): odd, unequal, and those of real models.
MHA_DIMS = ((2, 80, 96), (2, 3, 5), (4, 7, 7), (2, 192, 128))
MLA_DIMS = ((512, 64), (5, 3), (9, 6))
QUANTISED = ("fp4", "dsa")
FP4_DIMS = {"mha": ((2, 32, 16), (4, 16, 48)), "mla": ((32, 16), (48, 32))}
DSA_DIMS = ((128, 4), (256, 3))


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of a pool and of the step around it."""

    context: str
    layout: str
    mesh: tuple[int, int]  # dcp, tp
    kind: str
    dtype: str  # or one of QUANTISED
    dims: tuple[int, ...]
    source: str  # dtype of the rows
    ids: str  # dtype of the ids
    scale: str  # "none", "array" (traced) or "float" (a constant); for FP8
    checks: bool
    sync: bool  # how the verdict is asked for
    eager: bool  # doors called op by op, outside jit
    explicit: bool  # axis types of the mesh
    set_mesh: bool
    check_vma: bool
    split: bool  # the DCP axis is two mesh axes
    interleave: int
    padding_slot: int
    start_layer: int

    @property
    def on_mesh(self) -> bool:
        return self.context != "local" or self.mesh != (1, 1)

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The scales that the doors take here: all of them, or none."""
        if self.scale == "none":
            return ()
        return ("k_scale", "v_scale") if self.kind == "mha" else ("k_scale",)

    @property
    def stacked(self) -> bool:
        return self.layout == "stacked"

    @property
    def traced_layers(self) -> bool:
        return self.stacked and not self.eager

    @property
    def fp8(self) -> bool:
        return self.dtype in FP8

    def mesh_object(self) -> jax.sharding.Mesh:
        return _mesh(self.mesh, self.split, self.explicit)

    @property
    def dcp_axis(self) -> Any:
        return ("dcp_a", "dcp_b") if self.split else "dcp"

    def place_rows(self, rows: dict[str, np.ndarray]) -> Any:
        """Rows `[layers, N, ...]` as a caller's shard_map wants them: on an Explicit mesh they lie as its specs say."""
        if self.context != "shard_map" or not self.explicit:
            return rows
        return jax.device_put(rows, jax.NamedSharding(self.mesh_object(), self.rows_spec))

    @property
    def rows_spec(self) -> P:
        return P(None, None, "tp") if self.kind == "mha" else P()

    def new_pool(self) -> Any:
        place = {"mesh": self.mesh_object(), "dcp_axis": self.dcp_axis, "tp_axis": "tp"} if self.on_mesh else {}
        common = self._common() | {"interleave": self.interleave, "stacked": self.stacked, **place}
        if self.dtype not in QUANTISED:
            common["dtype"] = jnp.dtype(self.dtype)
        return self.pool_class.create(**common)

    @property
    def pool_class(self) -> Any:
        if self.dtype == "dsa":
            return jkv.DSATokenToKVPool
        plain, fp4 = {
            "mha": (jkv.MHATokenToKVPool, jkv.MHATokenToKVPoolFP4),
            "mla": (jkv.MLATokenToKVPool, jkv.MLATokenToKVPoolFP4),
        }[self.kind]
        return fp4 if self.dtype == "fp4" else plain

    def new_model(self) -> Any:
        cls = MHAModel if self.kind == "mha" else MLAModel
        codec = {"fp4": FP4Codec, "dsa": lambda: DSACodec(self.dims[0])}.get(
            self.dtype, lambda: jnp.dtype(self.dtype)
        )()
        return cls(**self._common(), dtype=codec, dcp_size=self.mesh[0], interleave=self.interleave)

    def _common(self) -> dict[str, Any]:
        names = ("head_num", "head_dim", "v_head_dim") if self.kind == "mha" else ("kv_lora_rank", "qk_rope_head_dim")
        geometry = {"size": SIZE, "page_size": PAGE, "layer_num": LAYERS, "start_layer": self.start_layer}
        return geometry | {"padding_slot": self.padding_slot} | dict(zip(names, self.dims, strict=True))

    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one row of each array that a write takes."""
        if self.kind == "mha":
            return {"k": self.dims[:2], "v": (self.dims[0], self.dims[2])}
        return {"k": (1, sum(self.dims)), "nope": (1, self.dims[0]), "rope": (1, self.dims[1])}


@functools.lru_cache
def _mesh(shape: tuple[int, int], split: bool, explicit: bool) -> jax.sharding.Mesh:
    dcp, tp = shape
    sizes, names = ((2, dcp // 2), ("dcp_a", "dcp_b")) if split else ((dcp,), ("dcp",))
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * (len(sizes) + 1)
    devices = jax.devices()[: dcp * tp]
    return jax.make_mesh((*sizes, tp), (*names, "tp"), devices=devices, axis_types=types)


FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": MESHES,
    "kind": ("mha", "mla"),
    "dtype": ("float32", "bfloat16", "float16", *FP8, *QUANTISED),
    "source": ("float32", "bfloat16", "float16"),
    "ids": ("int32", "int16", "int8", "int64"),
    "scale": ("none", "array", "float"),
    "checks": (True, False),
    "sync": (True, False),
    "eager": (True, False),
    "explicit": (True, False),
    "set_mesh": (True, False),
    "check_vma": (True, False),
    "split": (True, False),
    "interleave": (1, 2, 4),
    "padding_slot": (0, -1),
    "start_layer": (0, 3),
}


def _candidate(rng: random.Random, context: str, layout: str, turn: int) -> Case:
    pick = {name: rng.choice(values) for name, values in FACTORS.items()}
    # What matters most takes turns; the rest is drawn.
    pick["mesh"] = MESHES[turn % len(MESHES)]
    pick["dtype"] = FACTORS["dtype"][turn % len(FACTORS["dtype"])]
    pick["kind"] = FACTORS["kind"][turn // 3 % 2]
    if pick["dtype"] == "fp4":
        pick["kind"] = FACTORS["kind"][(CONTEXTS.index(context) + LAYOUTS.index(layout)) % 2]
    elif pick["dtype"] == "dsa":
        pick["kind"] = "mla"
    pick["checks"] = turn // 2 % 2 == 0
    pick["eager"] = context == "local" and turn % 3 != 0
    if context == "local" and turn % 3 != 2:
        pick["mesh"] = (1, 1)  # without a mesh
    if context != "shard_map":
        pick["check_vma"] = True
    if pick["mesh"][0] < 4:
        pick["split"] = False
    if pick["dtype"] not in FP8:
        pick["scale"] = "none"
    if not pick["checks"]:
        pick["sync"] = False
    plain = MHA_DIMS if pick["kind"] == "mha" else MLA_DIMS
    dims = rng.choice({"fp4": FP4_DIMS[pick["kind"]], "dsa": DSA_DIMS}.get(pick["dtype"], plain))
    return Case(context=context, layout=layout, dims=dims, **pick)


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    values = sorted((name, str(value)) for name, value in dataclasses.asdict(case).items())
    return set(itertools.combinations(values, 2))


def _gain(case: Case, seen: set[tuple[Any, ...]]) -> int:
    """How many pairs of values the case adds, those with its context or layout counted ten times."""
    return sum(10 if {a[0], b[0]} & {"context", "layout"} else 1 for a, b in _pairs(case) - seen)


@functools.lru_cache
def cases(context: str, layout: str) -> tuple[Case, ...]:
    """A fixed pseudo-random table: each case is the candidate that adds most new pairs of values to those before."""
    seen: set[tuple[Any, ...]] = set()
    table: dict[tuple[str, str], list[Case]] = {}
    rng = random.Random(20240)
    for n in range(CASES_PER_CELL):
        for cell in itertools.product(CONTEXTS, LAYOUTS):
            turn = n * len(LAYOUTS) + LAYOUTS.index(cell[1])
            best = max((_candidate(rng, *cell, turn) for _ in range(60)), key=lambda case: _gain(case, seen))
            seen |= _pairs(best)
            table.setdefault(cell, []).append(best)
    return tuple(table[context, layout])


# The steps. Each writes or reads every layer: in turn where the layers are a tuple, by a scan where they are stacked.


def _write(
    case: Case, door: str, pool: Any, layers: Any, loc: Any, rows: dict[str, Any], scales: dict[str, Any]
) -> Any:
    def one(pool: Any, layer: Any, loc: Any, rows: dict[str, Any]) -> Any:
        if case.kind == "mha":
            return pool.set_kv_buffer(layer, loc, rows["k"], rows["v"], **scales)
        if door == "set_mla":
            return pool.set_mla_kv_buffer(layer, loc, rows["nope"], rows["rope"], **scales)
        return pool.set_kv_buffer(layer, loc, rows["k"], **scales)

    if case.traced_layers:
        return jax.lax.scan(lambda pool, x: (one(pool, *x), None), pool, (layers, loc, rows))[0]
    for n in range(LAYERS):
        pool = one(pool, case.start_layer + n, loc[n], jax.tree.map(lambda x, n=n: x[n], rows))
    return pool


def _read(case: Case, pool: Any, layers: Any, loc: Any, scales: dict[str, Any]) -> dict[str, Any]:
    def one(layer: Any) -> dict[str, Any]:
        out = {"get_kv": pool.get_kv(layer, loc)}
        if scales:
            out["get_kv, scaled"] = pool.get_kv(layer, loc, **scales)
        if case.kind == "mla":
            out["get_mla_kv_buffer"] = pool.get_mla_kv_buffer(layer, loc)
            out["get_mla_kv_buffer, float32"] = pool.get_mla_kv_buffer(layer, loc, dst_dtype=jnp.float32)
        return out

    held = [case.start_layer + n for n in range(LAYERS)]
    if case.traced_layers:
        out = jax.lax.map(one, layers)
    else:
        out = jax.tree.map(lambda *x: jnp.stack(x), *[one(layer) for layer in held])
    return out | {
        "get_kv_buffer": [pool.get_kv_buffer(layer) for layer in held],
        "get_page_buffer": [pool.get_page_buffer(layer) for layer in held],
    }


def _read_specs(case: Case) -> dict[str, Any]:
    heads = "tp" if case.kind == "mha" else None
    rows, whole, pages = P(None, None, heads), P(case.dcp_axis, heads), P(case.dcp_axis, None, heads)
    read = {"get_kv": rows}
    if case.scale != "none":
        read["get_kv, scaled"] = rows
    if case.kind == "mla":
        read |= {"get_mla_kv_buffer": rows, "get_mla_kv_buffer, float32": rows}
    return read | {"get_kv_buffer": whole, "get_page_buffer": pages}


@functools.lru_cache
def step(case: Case, name: str) -> Any:
    """The step `name` ("set", "set_mla", "read", "move") of a case, as its context runs it."""
    constant = {name: CONSTANT_SCALES[name] for name in case.scale_names} if case.scale == "float" else {}

    def write(pool: Any, layers: Any, loc: Any, rows: Any, scales: Any) -> Any:
        return _write(case, name, pool, layers, loc, rows, constant or scales)

    def read(pool: Any, layers: Any, loc: Any, scales: Any) -> Any:
        return _read(case, pool, layers, loc, constant or scales)

    def move(pool: Any, tgt: Any, src: Any) -> Any:
        return pool.move_kv_cache(tgt, src)

    pool_specs, heads = P(), case.rows_spec
    if case.context == "shard_map":
        pool_specs = case.new_pool().partition_specs()
    fn, in_specs, out_specs = {
        "set": (write, (pool_specs, P(), P(), heads, P()), pool_specs),
        "set_mla": (write, (pool_specs, P(), P(), heads, P()), pool_specs),
        "read": (read, (pool_specs, P(), P(), P()), _read_specs(case)),
        "move": (move, (pool_specs, P(), P()), pool_specs),
    }[name]
    if case.context == "shard_map":
        mesh = case.mesh_object()
        fn = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=case.check_vma)
    if case.eager:
        return fn
    donated = () if name == "read" else (0,)
    return jkv.checked_jit(fn, donate_argnums=donated, **({"raise_sync": True} if case.checks and case.sync else {}))


def same_bits(got: Any, want: np.ndarray) -> bool:
    """Equal shape, dtype and bits; a NaN equals any NaN, which is all that a conversion promises."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    words = {4: np.uint32, 2: np.uint16, 1: np.uint8}[want.dtype.itemsize]
    bits = np.ascontiguousarray(got).view(words) == np.ascontiguousarray(want).view(words)
    return bool((bits | (np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))).all())
