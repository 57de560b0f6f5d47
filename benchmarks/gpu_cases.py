"""What `benchmarks.gpu_check` calls: ops with the rows of real models.

A new op is one builder, in `BUILDERS`, and its lines in `CASES`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from benchmarks import kernel_tools
from pallas_kernels import codecs, index

WIDE = "xla uint32"  # not an implementation of the library: XLA's scatter of words as wide as they get


@dataclasses.dataclass(frozen=True)
class Size:
    """How much: `n` rows of each of so many layers, that have so many rows."""

    n: int
    layers: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Calls of an op, one for each of `values`, each of which changes the state.

    Attributes:
      make: the first state, a tuple: buffers, and what was read from them.
      values: what each call takes beside the state.
      call: `(state, loc, values, i, layer, **options)` to the new state, for call i; `layer` is i, traced.
      nbytes: that a call must read and write.
      cast_to: the format of the buffers where a cast makes their words: their NaNs are all alike.
      ranks: whether it can be called as one of several ranks, without the others.
    """

    make: Callable[[], Any]
    values: Sequence[Any]
    call: Callable[..., Any]
    nbytes: int
    cast_to: str | None = None
    ranks: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with the rows of a model. `timed`: whether it is timed too, at how many rows."""

    op: str
    rows: str
    timed: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.op} {self.rows}"

    @property
    def spec(self) -> Any:
        """Its rows."""
        if self.op in QUANTISED:
            return kernel_tools.tool("quant_specs").named(self.rows)
        specs = kernel_tools.tool("specs")
        return next(r for r in (*specs.KV, *specs.MLA) if r.name == self.rows)

    def build(self, size: Size, implementation: str = "xla") -> Work:
        """Its calls; for `WIDE` on buffers of 32-bit words."""
        return (_wide if implementation == WIDE else BUILDERS[self.op])(self.spec, size)

    @property
    def implementations(self) -> tuple[str, ...]:
        """What to time: those of the library, and where it writes XLA's other form."""
        mine = pallas_kernels.dispatch.IMPLEMENTATIONS[self.op]
        return (*mine, WIDE) if self.op in ("scatter_kv", "scatter_mla") else mine


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_words(shape: tuple[int, ...], dtype: str, seed: jax.Array) -> jax.Array:
    return jax.random.bits(jax.random.key(seed), shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_rows(shape: tuple[int, ...], dtype: str, seed: jax.Array) -> jax.Array:
    """Floats of many magnitudes, none of them NaN."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    return jnp.exp2(jnp.round(8 * x[..., ::-1])).astype(dtype) * x.astype(dtype)


def _layers_of_rows(shapes: Sequence[tuple[int, ...]], dtype: str, layers: int) -> list[tuple[jax.Array, ...]]:
    return [
        tuple(_random_rows(shape, dtype, jnp.uint32(100 * layer + i)) for i, shape in enumerate(shapes))
        for layer in range(layers)
    ]


def _buffers(shapes: Sequence[tuple[int, ...]], dtype: Any, lead: tuple[int, ...]) -> tuple[jax.Array, ...]:
    name = jnp.dtype(dtype).name
    return tuple(_random_words((*lead, *shape), name, jnp.uint32(7 + i)) for i, shape in enumerate(shapes))


def _row_shapes(spec: Any) -> list[tuple[int, ...]]:
    """Of the buffers: K and V, or one of MLA rows."""
    return [(1, sum(width for _, width in spec.parts))] if spec in kernel_tools.tool("specs").MLA else list(spec.parts)


def _nbytes(shapes: Sequence[tuple[int, ...]], *dtypes: Any) -> int:
    """Of a row, once in each of the dtypes."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape in shapes for dtype in dtypes)


def _scale(spec: Any) -> jax.Array | None:
    return jnp.float32(0.37) if spec.scaled else None


def _scatter(op: str, spec: Any, size: Size) -> Work:
    """scatter_kv and scatter_mla."""
    write, shapes, scale = getattr(pallas_kernels, op), _row_shapes(spec), _scale(spec)

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        scales = {"scale": scale} if op == "scatter_mla" else {"k_scale": scale, "v_scale": scale}
        new = write(*state, loc, *values, dtype=spec.stored, layer=layer, skip_slot=0, **scales, **options)
        return new if isinstance(new, tuple) else (new,)

    return Work(
        make=lambda: _buffers(shapes, spec.word, (size.layers, size.rows)),
        values=_layers_of_rows([(size.n, *part) for part in spec.parts], spec.source, size.layers),
        call=call,
        nbytes=size.n * (_nbytes(spec.parts, spec.source, spec.word) + 4),
        cast_to=spec.stored if spec.scaled or spec.source != spec.stored else None,
    )


def _wide(spec: Any, size: Size) -> Work:
    """The same writes by XLA's scatter alone, with unique indices, on buffers of 32-bit words."""
    plain = _scatter("scatter_mla" if spec in kernel_tools.tool("specs").MLA else "scatter_kv", spec, size)
    scale, pack = _scale(spec), 4 // jnp.dtype(spec.word).itemsize
    shapes = [(math.prod(shape) // pack,) for shape in _row_shapes(spec)]

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        words = [codecs.to_words(v, spec.stored, scale).reshape(size.n, -1) for v in values]
        words = words if len(state) == len(words) else [jnp.concatenate(words, axis=-1)]
        row = index.local_row(loc, size.rows, skip_slot=0, **options)
        if pack > 1:
            words = [lax.bitcast_convert_type(w.reshape(size.n, -1, pack), jnp.uint32) for w in words]
        return tuple(index.set_rows(b, row, w, layer=layer) for b, w in zip(state, words, strict=True))

    return dataclasses.replace(plain, make=lambda: _buffers(shapes, "uint32", (size.layers, size.rows)), call=call)


def _scatter_rows(spec: Any, size: Size) -> Work:
    """To a buffer a layer, of words."""
    (shape, *_), word = _row_shapes(spec), spec.word

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        new = pallas_kernels.scatter_rows(state[i], loc, *values, skip_slot=0, **options)
        return (*state[:i], new, *state[i + 1 :])

    return Work(
        make=lambda: _buffers([shape] * size.layers, word, (size.rows,)),
        values=[_buffers([shape], word, (size.n,)) for _ in range(size.layers)],
        call=call,
        nbytes=size.n * (_nbytes([shape], word, word) + 4),
    )


def _gather_rows(spec: Any, size: Size) -> Work:
    """What was read is in the state, so that no call's result is dropped."""
    shapes, split = _row_shapes(spec), spec.parts[0][1] if len(_row_shapes(spec)) == 1 else None

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        buffers, read = state
        new = pallas_kernels.gather_rows(buffers, loc, layer=layer, split=split, **options)
        return buffers, (*read[:i], new, *read[i + 1 :])

    def make() -> Any:
        buffers, loc = _buffers(shapes, spec.word, (size.layers, size.rows)), jnp.full(size.n, -1, jnp.int32)
        zeros = pallas_kernels.gather_rows(buffers, loc, layer=0, split=split, implementation="xla")
        return buffers, tuple(jax.tree.map(jnp.copy, zeros) for _ in range(size.layers))

    return Work(make, [()] * size.layers, call, size.n * (_nbytes(shapes, spec.word, spec.word) + 4))


def _move_rows(spec: Any, size: Size) -> Work:
    """All layers in one call. Its rows are read and written twice, of which once is counted."""
    shapes = _row_shapes(spec)

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        return pallas_kernels.move_rows(state, loc, *values, stacked=True, skip_slot=0, **options)

    source = jax.random.randint(jax.random.key(3), (size.n,), 0, size.rows, jnp.int32)
    return Work(
        make=lambda: _buffers(shapes, spec.word, (size.layers, size.rows)),
        values=[(source,)],
        call=call,
        nbytes=size.n * (size.layers * _nbytes(shapes, spec.word, spec.word) + 8),
        ranks=False,
    )


def _quantised(spec: Any, size: Size) -> Work:
    """Writes that quantise."""
    quant = kernel_tools.tool("quant_calls")

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        return quant.write(spec, state, loc, values, layer=layer, skip_slot=0, **options)

    return Work(
        make=lambda: _buffers(spec.buffers, "uint8", (size.layers, size.rows)),
        values=_layers_of_rows([(size.n, *part) for part in spec.values], spec.source, size.layers),
        call=call,
        nbytes=size.n * (_nbytes(spec.values, spec.source) + _nbytes(spec.buffers, "uint8") + 4),
    )


def _dequantised(spec: Any, size: Size) -> Work:
    """What was read, as bfloat16, is in the state."""
    quant = kernel_tools.tool("quant_calls")

    def call(state: Any, loc: Any, values: Any, i: int, layer: Any, **options: Any) -> Any:
        buffers, read = state
        return buffers, (*read[:i], quant.read(spec, buffers, loc, layer=layer, **options), *read[i + 1 :])

    def make() -> Any:
        words = _buffers(spec.buffers, "uint8", (size.layers, size.rows))
        buffers = tuple(w & 0x3F for w in words)  # no NaN
        zeros = [
            jnp.zeros((size.n, *part), jnp.bfloat16) for part in (spec.values if spec.kind != "dsa" else spec.parts)
        ]
        return buffers, tuple(tuple(map(jnp.copy, zeros)) for _ in range(size.layers))

    nbytes = size.n * (_nbytes(spec.parts, jnp.bfloat16) + _nbytes(spec.buffers, "uint8") + 4)
    return Work(make, [()] * size.layers, call, nbytes)


QUANTISED: dict[str, Callable[[Any, Size], Work]] = {
    "scatter_kv_fp4": _quantised,
    "scatter_mla_fp4": _quantised,
    "scatter_dsa": _quantised,
    "gather_fp4": _dequantised,
    "gather_dsa": _dequantised,
}
BUILDERS: dict[str, Callable[[Any, Size], Work]] = {
    "scatter_kv": functools.partial(_scatter, "scatter_kv"),
    "scatter_mla": functools.partial(_scatter, "scatter_mla"),
    "scatter_rows": _scatter_rows,
    "gather_rows": _gather_rows,
    "move_rows": _move_rows,
    **QUANTISED,
}
ALL = (1, 16, 128, 1024, 16384, 65536)
FEW = (128, 16384)
# In the order of importance: where the time is up, the rest is not timed.
CASES = (
    Case("scatter_kv", "llama-3-8b", ALL),
    Case("scatter_mla", "deepseek-v3", ALL),
    Case("scatter_kv", "llama-3-8b-fp8", ALL),
    Case("scatter_mla", "deepseek-v3-fp8", FEW),
    Case("gather_rows", "deepseek-v3", FEW),
    Case("gather_rows", "llama-3-8b", FEW),
    Case("move_rows", "deepseek-v3", FEW),
    Case("scatter_rows", "deepseek-v3", FEW),
    Case("scatter_dsa", "deepseek-v3.2", FEW),
    Case("scatter_kv_fp4", "llama-3-8b", FEW),
    Case("scatter_mla_fp4", "deepseek-v3-fp4", FEW),
    Case("gather_dsa", "deepseek-v3.2", FEW),
    Case("gather_fp4", "llama-3-8b", FEW),
    Case("scatter_kv", "phi-2-fp8"),
    Case("scatter_kv", "smollm2-135m-f32"),
    Case("scatter_mla", "kimi-linear-nope"),
    Case("scatter_rows", "llama-3-8b-fp8"),
    Case("gather_rows", "deepseek-v3-fp8"),
    Case("move_rows", "llama-3-8b-fp8"),
    Case("scatter_kv_fp4", "phi-2"),
    Case("scatter_dsa", "deepseek-v3.2-f32"),
    Case("gather_fp4", "deepseek-v3-fp4"),
)
