"""Compiles calls of the ops for a GPU that is not here, and says what came out: a program of its own for each chip.

    python tests/kernels/aot.py CHIP < calls.json > facts.json

reads a list of `Call`s and prints a fact sheet for each: memory, kernels and whole-buffer instructions of the compiled
module, and the PTX of each kernel. Needs jax's CUDA plugin of the same version, without its libraries or a driver.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

# (major, minor, multiprocessors, shared memory a block and a multiprocessor, bytes/s, L2, memory): NVIDIA's data sheets
CHIPS = {
    "A100": (8, 0, 108, 166912, 167936, 1_555_000_000_000, 40 << 20, 40 << 30),
    "H200": (9, 0, 132, 232448, 233472, 4_800_000_000_000, 60 << 20, 141 << 30),
    "B200": (10, 0, 148, 232448, 233472, 8_000_000_000_000, 126 << 20, 180 << 30),
}
RANKS, LAYERS, BLOCK_ROWS = 4, 2, 100_000


@dataclasses.dataclass(frozen=True)
class Call:
    """What to compile.

    Attributes:
      op: the op's name. rows: the name of a spec.
      where: "alone", "shards" (a shard_map over four chips), "scan" (over the layers of stacked buffers, in the
        shard_map; of moves, which take all layers, one after the other) or "checks" (the pool's door in `checked_jit`,
        on four chips; for `scatter_rows`, which is no pool's, beside a probe of its ids).
      implementation: a name, or None for what dispatch picks.
      n: rows that are moved. size: rows of a buffer on one chip.
      stacked: for `move_rows` alone: one array of all layers.
      config: rows and warps of a program.
      plant: the name of a fault to plant first.
      ids: dtype of the slot ids.
    """

    op: str
    rows: str
    where: str = "alone"
    implementation: str | None = None
    n: int = 64
    size: int = BLOCK_ROWS
    stacked: bool = False
    config: tuple[int | None, int | None] | None = None
    plant: str | None = None
    ids: str = "int32"

    @property
    def label(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{k}={v}" if k not in ("op", "rows") else str(v) for k, v in given.items())


def environment() -> dict[str, str]:
    """What the program must run under."""
    import importlib.metadata

    version = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])
    flags = ["--xla_gpu_fail_ptx_compilation_on_register_spilling=true"]
    flags += ["--xla_dump_emitter_re=.*"] if version >= (0, 11) else []  # else PTX is dumped unasked
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JKV_ENABLE_ASYNC_ASSERT": "0",
        "LLVM_DISABLE_SYMBOLIZATION": "1",  # of a stack trace in a status that nobody reads: 20 seconds a compilation
        "MOSAIC_GPU_DUMP_PTX": "1",
        "XLA_FLAGS": " ".join(flags),
    }


def devices(chip: str, chips: int) -> list[Any]:
    """Devices for a mesh. Nothing runs on them."""
    from jax.experimental import topologies

    major, minor, cores, block, core, bandwidth, l2, memory = CHIPS[chip]
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {core} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: 1.9 device_memory_size: {memory}
  shared_memory_per_block_optin: {block} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {chip}"
"""
    options = {"target_config": config, "topology": f"1x1x{chips}"}
    return list(topologies.get_topology_desc(platform="cuda", topology_name=chip, **options).devices)


class Program:
    """A call as a function to compile: `lower()`, and `buffers`, the bytes of each on one chip."""

    def __init__(self, call: Call, chip: str) -> None:
        import jax
        import numpy as np
        import specs
        from jax.sharding import Mesh

        self.call, self.jax = call, jax
        self.rows = next(r for r in (*specs.KV, *specs.MLA) if r.name == call.rows)
        self.mla = self.rows in specs.MLA
        self.ranks = 1 if call.where == "alone" else RANKS
        self.mesh = Mesh(np.array(devices(chip, self.ranks)), ("dcp",))
        self.layers = LAYERS if call.stacked or call.where == "scan" else None

    def _aval(self, shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        sharding = self.jax.sharding.NamedSharding(self.mesh, self.jax.sharding.PartitionSpec(*spec))
        return self.jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _buffers(self) -> list[Any]:
        parts = [(1, sum(w for _, w in self.rows.parts))] if self.mla else list(self.rows.parts)
        parts = parts[:1] if self.call.op == "scatter_rows" else parts
        if self.layers is None:
            shapes, spec = [(self.ranks * self.call.size, *p) for p in parts], ("dcp",)
        else:
            shapes, spec = [(self.layers, self.ranks * self.call.size, *p) for p in parts], (None, "dcp")
        separate = 3 if self.call.op == "move_rows" and not self.call.stacked else 1
        return [self._aval(shape, self.rows.word, *spec) for _ in range(separate) for shape in shapes]

    def _values(self) -> list[Any]:
        n, source = self.call.n, self.rows.source
        if self.call.op == "scatter_rows":
            return [self._aval((n, *self._buffers()[0].shape[-2:]), self.rows.word)]
        return [self._aval((n, *part), source) for part in self.rows.parts]

    def lower(self) -> Any:
        """The lowered program. Sets `buffers`, their bytes on one chip."""
        import jkv

        jax, call = self.jax, self.call
        checks = call.where == "checks"
        if checks and call.op != "scatter_rows":
            return self._door()
        buffers, values = self._buffers(), self._values()
        self.buffers = [b.size * b.dtype.itemsize // self.ranks for b in buffers]
        loc, scale = self._aval((call.n,), call.ids), self._aval((), "float32")
        if self.ranks == 1:
            fn: Any = lambda buffers, *args: self._step(buffers, *args, 0)  # noqa: E731
        else:
            specs = tuple(b.sharding.spec for b in buffers)
            out = jax.sharding.PartitionSpec()
            fn = jax.shard_map(
                lambda *args: self._step(*args, jax.lax.axis_index("dcp")),
                mesh=self.mesh,
                in_specs=(specs, *[out] * 3),
                out_specs=specs if call.op != "gather_rows" else out,
                check_vma=False,
            )

        def step(buffers: Any, loc: Any, *args: Any) -> Any:
            jkv.maybe_detect_oob(loc, 0, call.size * self.ranks, call.op)
            return fn(buffers, loc, *args)

        donate = () if call.op == "gather_rows" else (0,)
        with jkv.enable_checks(checks), jax.enable_x64(call.ids == "int64"):
            jit: Any = jkv.checked_jit if checks else jax.jit
            traced = jit(step, donate_argnums=donate).trace(tuple(buffers), loc, values, scale)
            return traced.lower(lowering_platforms=("cuda",))

    def _step(self, buffers: Any, loc: Any, values: Any, scale: Any, rank: Any) -> Any:
        from jax import lax

        import pallas_kernels
        from pallas_kernels.dispatch import KernelConfig

        call, rows = self.call, self.rows
        config = None if call.config is None else KernelConfig(*call.config)
        run = {"implementation": call.implementation, "config": config}
        slots = run | {"dcp_size": self.ranks, "dcp_rank": rank, "interleave": 1}
        scale = scale if rows.scaled else None

        def one(buffers: Any, layer: Any) -> Any:
            at = slots | {"layer": layer}
            if call.op == "gather_rows":
                return pallas_kernels.gather_rows(buffers, loc, split=rows.parts[0][1] if self.mla else None, **at)
            at |= {"dtype": rows.stored, "skip_slot": 0}
            if call.op == "scatter_mla":
                return (pallas_kernels.scatter_mla(*buffers, loc, *values, scale=scale, **at),)
            return pallas_kernels.scatter_kv(*buffers, loc, *values, k_scale=scale, v_scale=scale, **at)

        def rows_of_layer(buffers: Any, layer: Any) -> Any:
            """Of a buffer that is stacked, but for an op that takes no layer: as one buffer of all layers' rows."""
            (cache,), bound = buffers, call.size * self.ranks
            at = self.jax.numpy.where((loc > 0) & (loc < bound), loc + layer * bound, -1)
            flat = cache.reshape(-1, *cache.shape[2:])
            return (pallas_kernels.scatter_rows(flat, at, *values, **slots).reshape(cache.shape),)

        def moved(buffers: Any, by: Any) -> Any:
            axis = None if self.ranks == 1 else "dcp"
            options = slots | {"stacked": call.stacked, "axis_name": axis, "skip_slot": 0}
            return pallas_kernels.move_rows(buffers, loc, loc + by, **options)

        if call.op == "scatter_rows":
            if call.where != "scan":
                return (pallas_kernels.scatter_rows(*buffers, loc, *values, skip_slot=0, **slots),)
            one = rows_of_layer
        if call.op == "move_rows":
            if call.where != "scan":
                return moved(buffers, 1)
            one = moved
        if call.where != "scan":
            return one(buffers, None)
        layers = self.jax.numpy.arange(self.layers)
        if call.op == "gather_rows":
            return lax.scan(lambda carry, layer: (carry, one(buffers, layer)), 0, layers)[1]
        return lax.scan(lambda carry, layer: (one(carry, layer), None), tuple(buffers), layers)[0]

    def _door(self) -> Any:
        """The pool's door for this op, with checks on."""
        import jkv

        jax, call, rows = self.jax, self.call, self.rows
        options: dict[str, Any] = {"size": call.size - 16, "page_size": 16, "dtype": rows.stored, "layer_num": LAYERS}
        options |= {"mesh": self.mesh, "dcp_axis": "dcp", "stacked": True}
        if self.mla:
            family, dims = (
                jkv.MLATokenToKVPool,
                {"kv_lora_rank": rows.parts[0][1], "qk_rope_head_dim": rows.parts[1][1]},
            )
        else:
            (heads, k), (_, v) = rows.parts
            family, dims = jkv.MHATokenToKVPool, {"head_num": heads, "head_dim": k, "v_head_dim": v}
        pool = jax.eval_shape(lambda: family.create(**options, **dims))
        attach = lambda x, spec: self._aval(x.shape, x.dtype, *spec)  # noqa: E731
        specs = pool.partition_specs()
        pool = jax.tree.map(attach, pool, specs)
        self.buffers = [x.size * x.dtype.itemsize // self.ranks for x in jax.tree.leaves(pool)]
        loc, layer = self._aval((call.n,), "int32"), self._aval((), "int32")

        def step(pool: Any, layer: Any, loc: Any, values: Any) -> Any:
            if call.op == "move_rows":
                return pool.move_kv_cache(loc, loc + 1)
            if call.op == "gather_rows":
                return pool.get_mla_kv_buffer(layer, loc) if self.mla else pool.get_kv(layer, loc)
            return (pool.set_mla_kv_buffer if self.mla else pool.set_kv_buffer)(layer, loc, *values)

        donate = () if call.op == "gather_rows" else (0,)
        with jkv.enable_checks():
            traced = jkv.checked_jit(step, donate_argnums=donate).trace(pool, layer, loc, self._values())
            return traced.lower(lowering_platforms=("cuda",))


# Instructions that do not touch what they pass on.
_FREE = (
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "while",
    "conditional",
    "call",
    "custom-call",
    "constant",
)
_ITEM = {"u8": 1, "s8": 1, "pred": 1, "u16": 2, "bf16": 2, "f16": 2, "u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8}
_ITEM |= {"f8e4m3fn": 1, "f8e5m2": 1}


# Of a Triton kernel in the compiled module's text.
_GRID = r"grid_x = (\d+)[^,]*, grid_y = (\d+)[^,]*, grid_z = 1[^,]*, .*?name = \"(\w+)\""


def facts(lowered: Any, buffers: list[int], dump: pathlib.Path) -> dict[str, Any]:
    """Compiles, and says what came out. `buffers`: bytes of each."""
    before, log = set(os.listdir(dump)), tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(log.fileno(), 1)  # a Mosaic kernel's PTX is printed
    try:
        compiled = lowered.compile()
    finally:
        os.dup2(out, 1)
        os.close(out)
    log.seek(0)
    printed = log.read().decode(errors="replace")
    text, memory = compiled.as_text(), compiled.memory_analysis()
    whole = []
    for name, types, opcode in re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(?[^=]*?) ([\w-]+)\(", text, re.MULTILINE):
        sizes = [_bytes(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", types)]
        if opcode not in _FREE and any(size >= min(buffers) for size in sizes):
            whole.append(f"{name} = {opcode}")
    new = sorted(dump / name for name in set(os.listdir(dump)) - before)
    ptx = [path.read_text() for path in new if path.suffix == ".ptx"] + re.split(
        r"(?=^\.version )", printed, flags=re.M
    )
    entries = {}
    for module in ptx:
        for match in re.finditer(r"\.visible \.entry (\w+)\(.*?\n}\n?", module, re.DOTALL):
            entries[match[1]] = module[: module.index(".visible .entry")] + match[0]
    return {
        "buffers": buffers,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "kernels": re.findall(r"custom_call_target=\"(__gpu\$xla\.gpu\.triton|mosaic_gpu\w*)\"", text),
        "grids": {m[3]: (int(m[1]), int(m[2])) for m in re.finditer(_GRID, text)},
        "whole": whole,
        "ptx": {name: body for name, body in entries.items() if re.match(r"(scatter|gather|move)_", name)},
        "others": sorted(name for name in entries if not re.match(r"(scatter|gather|move)_", name)),
    }


def _bytes(dtype: str, dims: str) -> int:
    size = _ITEM.get(dtype, 0)
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """The library with a fault in it."""
    if fault is None:
        yield
        return
    import jax

    from pallas_kernels import triton
    from pallas_kernels.triton import rows

    if fault != "32-bit offset":
        raise ValueError(f"no fault {fault!r}")
    kept = rows._word_bytes, triton.refusal
    rows._word_bytes = lambda buffers, columns, lead: [b.dtype.itemsize for b in buffers]
    triton.refusal = lambda *args: None
    jax.clear_caches()
    try:
        yield
    finally:
        rows._word_bytes, triton.refusal = kept
        jax.clear_caches()


def main(chip: str) -> None:
    """Reads calls, prints facts."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="jkv-aot-"))
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={dump}"  # before jax is imported
    results = []
    for plain in json.load(sys.stdin):
        plain["config"] = plain["config"] and tuple(plain["config"])
        call = Call(**plain)
        try:
            program = Program(call, chip)
            with planted(call.plant):
                lowered = program.lower()
            results.append(facts(lowered, program.buffers, dump))
        except Exception as error:  # it is the test's to judge
            results.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
