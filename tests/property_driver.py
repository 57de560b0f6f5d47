"""Random sequences of operations on a pool and on its model, compared in every row of every buffer after each one."""

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from property_cases import CONSTANT_SCALES, LAYERS, PAGE, QUANTISED, SIZE, Case, N, same_bits, step

import jkv
from jkv.testing import assert_invariants, assert_pool_equals

GOOD = ("any", "high", "above one rank", "last")
BAD = ("minus one", "negative", "bound", "beyond", "lowest", "highest")
ID_KINDS = (*GOOD, *BAD, "zero", "padding", "repeat")
ROW_KINDS = ("normal", "nan", "infinite", "huge", "tiny")
OPS = ("set", "set_mla", "read", "move", "host")
SCALES = (1.0, 0.04, 3.7, 400.0)

_id = st.tuples(st.sampled_from(GOOD * 4 + BAD + ("zero", "padding", "padding", "repeat")), st.integers(0, 2**15))
_ids = st.lists(_id, min_size=N, max_size=N)
_row_kinds = st.lists(st.sampled_from(("normal",) * 12 + ROW_KINDS), min_size=N, max_size=N)
# One entry a layer that the step visits: (written at all, a layer that the pool doesn't hold, ids, kinds of rows).
_layer = st.tuples(st.sampled_from((True, True, False)), st.sampled_from((None,) * 12 + (-1, 7)), _ids, _row_kinds)
_write = st.tuples(
    st.sampled_from(("set", "set_mla")),
    st.lists(_layer, min_size=LAYERS, max_size=LAYERS),
    st.integers(0, 2**31 - 1),
    st.sampled_from(SCALES),
    st.sampled_from(SCALES),
)
_read = st.tuples(st.just("read"), _ids, st.sampled_from((None,) * 8 + (-1, 7)))
_move = st.tuples(st.just("move"), _ids, _ids)
_host = st.tuples(st.just("host"), _ids, _ids)
_operations = st.lists(st.one_of(_write, _write, _write, _read, _move, _move, _host), min_size=4, max_size=8)
sequences = st.tuples(st.sampled_from((0, 1, 2)), _operations)  # what fills the pool first (0: nothing), and then


class Run:
    """One pool, its model, and the count of what was done to them."""

    def __init__(self, case: Case, coverage: collections.Counter[str]) -> None:
        self.case, self.coverage = case, coverage
        self.pool, self.model = case.new_pool(), case.new_model()
        family = case.pool_class.label
        self.how = re.escape(f"[0, {self.model.bound}) = (size {SIZE} + page_size {PAGE}) * dcp_size {case.mesh[0]}")
        self.labels = {
            "set": f"set_kv_buffer ({family})",
            "set_mla": f"set_mla_kv_buffer ({family})",
            "move": f"move_kv_cache ({family})",
        }
        self.readers = [f"get_kv ({family})"] + ([f"get_mla_kv_buffer ({family})"] if case.kind == "mla" else [])

    def play(self, filling: int, operations: list[tuple[Any, ...]]) -> None:
        """Runs a sequence. Raises AssertionError at the first operation whose outcome is not the model's."""
        self.compare("create")
        if filling:
            self.fill(filling)
        for op, *arguments in operations:
            {"set": self.write, "set_mla": self.write, "read": self.read, "move": self.move, "host": self.host}[op](
                *((op, *arguments) if op in ("set", "set_mla") else arguments)
            )
            self.compare(op)
        assert_invariants(self.pool)
        case = self.case
        for name in ("mesh", "kind", "dtype", "source", "ids", "checks", "interleave", "padding_slot", "start_layer"):
            self.coverage[f"{name}: {getattr(case, name)}"] += 1
        self.coverage["sequences"] += 1

    def fill(self, seed: int) -> None:
        """Any bits in every row but slot 0's, NaN among them: what is to keep its bits has some to lose.

        Quantised rows are those of any values: some of their bytes mean nothing.
        """
        rng, fields = np.random.default_rng(seed), {}
        for tensor, shape in self.model.tensors.items():
            values = rng.standard_normal((LAYERS, self.model.bound, *shape)).astype(np.float32)
            values *= np.exp2(rng.integers(-30, 30, values.shape[:2]))[..., None, None]
            values[rng.random(values.shape) < 0.01] = np.nan
            for part, words in self.model.codec.encode(values).items():
                self.model.buffers[f"{tensor}_{part}"][...] = words
        for name, buffer in self.model.buffers.items():
            if self.case.dtype not in QUANTISED:
                buffer[...] = rng.integers(0, 2 ** (8 * buffer.itemsize), buffer.shape)
            buffer[:, 0] = 0
            old = getattr(self.pool, name)
            fields[name] = jax.tree.map(
                lambda x, words: jax.device_put(words.copy(), x.sharding), old, self.words(buffer)
            )
        self.pool = dataclasses.replace(self.pool, **fields)
        self.coverage["filled"] += 1

    def words(self, buffer: np.ndarray) -> Any:
        return buffer if self.case.stacked else tuple(buffer)

    def compare(self, op: str) -> None:
        try:
            assert_pool_equals(self.pool, self.model)
        except AssertionError as error:
            raise AssertionError(f"after {op}: {error}") from None
        self.model.settle(self.pool)

    # Drawn values to arguments.

    def ids(self, drawn: list[tuple[str, int]]) -> np.ndarray:
        """The ids, in the case's dtype; kinds are counted as drawn."""
        bound, info = self.model.bound, np.iinfo(np.int32 if self.case.ids == "int64" else self.case.ids)
        out: list[int] = []
        for kind, n in drawn:
            value = {
                "any": 1 + n % (bound - 1),
                "high": bound - 1 - n % PAGE,
                "above one rank": min(SIZE + PAGE + n % PAGE, bound - 1),
                "last": bound - 1,
                "minus one": -1,
                "negative": -2 - n,
                "bound": bound,
                "beyond": bound + 1 + n,
                "lowest": int(info.min),
                "highest": int(info.max),
                "zero": 0,
                "padding": self.case.padding_slot,
                "repeat": out[-1] if out else 0,
            }[kind]
            # Good kinds stay distinct, so that repeats are few and meant.
            while kind in GOOD and value in out:
                value = value % (bound - 1) + 1
            out.append(max(info.min, min(info.max, value)))
            self.coverage[f"id: {kind}"] += 1
        return np.array(out, self.case.ids)

    def rows(
        self, rng: np.random.Generator, loc: np.ndarray, kinds: list[str], scales: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        """Rows for a write at `loc`. Rows with padding ids are NaN every other time."""
        out = {}
        for name, shape in self.case.row_shapes().items():
            values = (rng.standard_normal((N, *shape)) * np.exp2(rng.integers(-12, 10, (N, *shape)))).astype(np.float32)
            scale = scales.get("v_scale" if name == "v" else "k_scale")
            if scale is not None:  # every other value divides to a tie between two codes, or one ulp beside it
                codes = 2 ** jnp.finfo(self.case.dtype).nmant
                ties = (rng.integers(codes, 2 * codes, values.shape) + 0.5) / codes
                ties *= np.exp2(rng.integers(-4, 6, values.shape))
                values[..., ::2] = (ties.astype(np.float32) * np.float32(scale))[..., ::2]
            for n, kind in enumerate(kinds):
                row = values[n].reshape(-1)
                spot = rng.integers(row.size)
                if self.model.is_padding(int(loc[n])) and rng.integers(2):
                    row[:] = np.nan
                elif kind != "normal":
                    row[spot] = {"nan": np.nan, "infinite": -np.inf, "huge": 6e4, "tiny": 2**-24}[kind]
            out[name] = values.astype(jnp.dtype(self.case.source))
        return out

    # What the probes must say. One list of patterns a door, in the order of the doors; empty where it finds nothing.

    def bad_id_patterns(self, label: str, layer: int | None, loc: np.ndarray) -> list[str]:
        bad = self.model.bad_ids(loc)
        if not bad:
            return []
        live = [int(i) for i in loc if not self.model.is_padding(int(i))]
        where = "" if layer is None else f", layer {layer}"
        numbers = f"{len(bad)} of {len(loc)} slot ids outside {self.how}; min {min(live)}, max {max(live)}"
        return [re.escape(label + where) + ": " + numbers]

    def twice_patterns(self, label: str, layer: int | None, loc: np.ndarray) -> list[str]:
        twice = self.model.written_twice(loc)
        where = "" if layer is None else f", layer {layer}"
        return [re.escape(label + where) + rf": .*written twice.*\b{twice[0]}\b"] if twice else []

    def layer_patterns(self, label: str, layer: int) -> list[str]:
        start = self.case.start_layer
        if self.model.layer_index(layer) is not None:
            return []
        return [re.escape(f"{label}: layer {layer} outside [{start}, {start + LAYERS})")]

    def write_patterns(self, label: str, layer: int, loc: np.ndarray, rows: dict[str, np.ndarray]) -> list[str]:
        found = self.layer_patterns(label, layer) + self.bad_id_patterns(label, layer, loc)
        found += self.twice_patterns(label, layer, loc)
        for n, i in enumerate(loc):
            if not self.model.is_padding(int(i)) and any(
                np.isnan(x[n].astype(np.float32)).any() for x in rows.values()
            ):
                found.append(
                    re.escape(f"{label}, layer {layer}") + r": \d+ of \d+ rows of .* hold NaN; first at slot id "
                )
                break
        return found

    # Operations.

    def call(self, doors: list[list[str]], function: Any, *args: Any) -> Any:
        """Calls a step or an eager door, and checks its verdict against that of the first door that finds something."""
        case = self.case
        expected = next((patterns for patterns in doors if patterns), [])
        error, out = None, None
        with jkv.enable_checks(case.checks), _set_mesh(case):
            try:
                out = function(*args)
                jkv.wait_for_checks()
            except jkv.KVIndexError as caught:
                error = caught
                out = getattr(caught, "outputs", None) if out is None else out
        if case.checks and (error is None) != (not expected):
            raise AssertionError(f"expected a verdict like {expected or 'none'}, got {error!r}")
        if error is not None:
            self.coverage["verdicts"] += 1
            if not any(re.fullmatch(f"{pattern}.*", str(error)) for pattern in expected):
                raise AssertionError(f"expected a verdict like {expected}, got {error!r}")
        if error is not None and out is None:  # an eager door raised: nothing happened, and nothing was lost
            self.compare("an eager door that raised")
            with jkv.enable_checks(False), _set_mesh(case):
                out = function(*args)
        return out

    def write(self, op: str, layers: list[Any], seed: int, k_scale: float, v_scale: float) -> None:
        case, rng = self.case, np.random.default_rng(seed)
        op = "set" if case.kind == "mha" else op
        self.coverage[f"op: {op}"] += 1
        names = {"set_mla": ("nope", "rope")}.get(op, ("k", "v") if case.kind == "mha" else ("k",))
        writes, scales = [], self.scales(k_scale, v_scale)
        for n, (written, off, drawn, kinds) in enumerate(layers):
            layer = case.start_layer + (off if off is not None and case.traced_layers else n)
            self.coverage["layer: not held"] += self.model.layer_index(layer) is None
            loc = self.ids(drawn) if written else np.full(N, case.padding_slot, case.ids)
            rows = self.rows(rng, loc, kinds, scales)
            writes.append((layer, loc, {name: rows[name] for name in names}))
        if case.eager:
            for write in writes:
                self.write_eagerly(op, *write, scales)
            return
        layer_ids, locs, rows = zip(*writes, strict=True)
        stacked = case.place_rows({name: np.stack([r[name] for r in rows]) for name in names})
        doors = [self.write_patterns(self.labels[op], *write) for write in writes]
        args = (np.array(layer_ids, np.int32), np.stack(locs), stacked, scales if case.scale == "array" else {})
        self.pool = self.call(doors, step(case, op), self.pool, *args)
        for write in writes:
            self.write_to_model(op, *write, scales)

    def write_eagerly(self, op: str, layer: int, loc: np.ndarray, rows: dict[str, Any], scales: dict[str, Any]) -> None:
        self.coverage["ids: none"] += 1
        for n in (0, N):
            door = self.pool.set_mla_kv_buffer if op == "set_mla" else self.pool.set_kv_buffer
            arrays = {name: x[:n] for name, x in rows.items()}
            found = self.write_patterns(self.labels[op], layer, loc[:n], arrays)
            self.pool = self.call([found], functools.partial(door, **scales), layer, loc[:n], *arrays.values())
            self.write_to_model(op, layer, loc[:n], arrays, scales)
            self.compare(op)

    def write_to_model(
        self, op: str, layer: int, loc: np.ndarray, rows: dict[str, Any], scales: dict[str, Any]
    ) -> None:
        door = self.model.set_mla_kv_buffer if op == "set_mla" else self.model.set_kv_buffer
        door(layer, loc, *rows.values(), **{name: np.asarray(value).item() for name, value in scales.items()})

    def scales(self, k_scale: float, v_scale: float) -> dict[str, Any]:
        given = {"k_scale": np.float32(k_scale), "v_scale": np.full(1, v_scale, np.float32)}
        if self.case.scale == "float":
            given = CONSTANT_SCALES
        return {name: given[name] for name in self.case.scale_names}

    def read(self, drawn: list[Any], off: int | None) -> None:
        case = self.case
        self.coverage["op: read"] += 1
        loc, scales = self.ids(drawn), self.scales(0.04, 3.7)
        layers = [case.start_layer + n for n in range(LAYERS)]
        if off is not None and case.traced_layers:
            layers[-1] = case.start_layer + off
            self.coverage["layer: not held"] += 1
        found = []
        for label in self.readers:
            for layer in layers:
                found += self.bad_id_patterns(label, layer, loc) + self.layer_patterns(label, layer)
        out = self.call(
            [found],
            step(case, "read"),
            self.pool,
            np.array(layers, np.int32),
            loc,
            scales if case.scale != "float" else {},
        )
        want = self.expected_read(layers, loc, {k: np.asarray(v).item() for k, v in scales.items()})
        assert set(out) == set(want)
        for name, arrays in want.items():
            for got, expected in zip(jax.tree.leaves(out[name]), jax.tree.leaves(arrays), strict=True):
                assert same_bits(got, expected), f"{name} of ids {loc.tolist()} differs from the model"

    def expected_read(self, layers: list[int], loc: np.ndarray, scales: dict[str, Any]) -> dict[str, Any]:
        def stack(door: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
            return [np.stack(x) for x in zip(*[door(layer, *args, **kwargs) for layer in layers], strict=True)]

        model, held = self.model, [self.case.start_layer + n for n in range(LAYERS)]
        out: dict[str, Any] = {"get_kv": stack(model.get_kv, loc)}
        if scales:
            out["get_kv, scaled"] = stack(model.get_kv, loc, **scales)
        if self.case.kind == "mla":
            out["get_mla_kv_buffer"] = stack(model.get_mla_kv_buffer, loc)
            out["get_mla_kv_buffer, float32"] = stack(model.get_mla_kv_buffer, loc, dst_dtype=np.float32)
        out["get_kv_buffer"] = [model.get_kv_buffer(layer) for layer in held]
        out["get_page_buffer"] = [model.get_page_buffer(layer) for layer in held]
        return out

    def move(self, drawn_tgt: list[Any], drawn_src: list[Any]) -> None:
        self.coverage["op: move"] += 1
        tgt, src = self.ids(drawn_tgt), self.ids(drawn_src)
        self.coverage["move: overlaps"] += bool(set(tgt.tolist()) & set(src.tolist()))
        label = self.labels["move"]
        found = self.bad_id_patterns(f"{label} src_loc", None, src) + self.bad_id_patterns(
            f"{label} tgt_loc", None, tgt
        )
        found += self.twice_patterns(f"{label} tgt_loc", None, tgt)
        self.pool = self.call([found], step(self.case, "move"), self.pool, tgt, src)
        self.model.move_kv_cache(tgt, src)

    def host(self, drawn_from: list[Any], drawn_to: list[Any]) -> None:
        self.coverage["op: host"] += 1
        family = self.case.pool_class.label
        source, target = self.ids(drawn_from), self.ids(drawn_to)
        found = self.bad_id_patterns(f"get_cpu_copy ({family})", None, source)
        host = self.call([found], self.pool.get_cpu_copy, source)
        label = f"load_cpu_copy ({family})"
        found = self.bad_id_patterns(label, None, target) + self.twice_patterns(label, None, target)
        self.pool = self.call([found], self.pool.load_cpu_copy, host, target)
        self.model.load_cpu_copy(self.model.get_cpu_copy(source), target)


@contextlib.contextmanager
def _set_mesh(case: Case) -> Iterator[None]:
    if case.on_mesh and case.set_mesh:
        with jax.set_mesh(case.mesh_object()):
            yield
    else:
        yield
