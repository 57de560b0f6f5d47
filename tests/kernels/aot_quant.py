"""`aot` for the ops that quantise and those that read back.

python tests/kernels/aot_quant.py CHIP < calls.json > facts.json
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import aot


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """The library with a fault in it."""
    import jax
    import numpy as np
    from jax import lax

    from pallas_kernels.triton import launch

    right = launch.locate

    def locate(*args: Any) -> tuple[Any, ...]:
        """The row by way of the number of its byte, in 32 bits."""
        token, live, row, here, layer = right(*args)
        return token, live, lax.div(row * np.int32(512), np.int32(512)), here, layer

    if fault not in (None, "32-bit offset"):
        raise ValueError(f"no fault {fault!r}")
    if fault is not None:
        jax.clear_caches()
        launch.locate = locate
    try:
        yield
    finally:
        launch.locate = right
        if fault is not None:
            jax.clear_caches()


class Program(aot.Program):
    """A call as a function to compile; its rows are of `quant_specs`."""

    def __init__(self, call: aot.Call, chip: str) -> None:
        import jax
        import numpy as np
        import quant_specs
        from jax.sharding import Mesh

        self.call, self.jax = call, jax
        self.rows = quant_specs.named(call.rows)
        self.reads = call.op == self.rows.gather
        self.ranks = 1 if call.where == "alone" else aot.RANKS
        self.mesh = Mesh(np.array(aot.devices(chip, self.ranks)), ("dcp",))
        self.layers = aot.LAYERS if call.where == "scan" else None

    def _buffers(self) -> list[Any]:
        rows = self.ranks * self.call.size
        lead, spec = ((rows,), ("dcp",)) if self.layers is None else ((self.layers, rows), (None, "dcp"))
        return [self._aval((*lead, *shape), "uint8", *spec) for shape in self.rows.buffers]

    def _values(self) -> list[Any]:
        return [self._aval((self.call.n, *part), self.rows.source) for part in self.rows.values]

    def lower(self) -> Any:
        """The lowered program. Sets `buffers`, their bytes on one chip."""
        if self.call.where == "checks":
            return self._door()
        jax, buffers, values = self.jax, self._buffers(), self._values()
        self.buffers = [b.size // self.ranks for b in buffers]
        fn: Any = lambda *args: self._step(*args, 0)  # noqa: E731
        if self.ranks > 1:
            specs, rest = tuple(b.sharding.spec for b in buffers), jax.sharding.PartitionSpec()
            fn = jax.shard_map(
                lambda *args: self._step(*args, jax.lax.axis_index("dcp")),
                mesh=self.mesh,
                in_specs=(specs, rest, rest),
                out_specs=rest if self.reads else specs,
                check_vma=False,
            )
        donate = () if self.reads else (0,)
        traced = jax.jit(fn, donate_argnums=donate).trace(tuple(buffers), self._aval((self.call.n,), "int32"), values)
        return traced.lower(lowering_platforms=("cuda",))

    def _step(self, buffers: Any, loc: Any, values: Any, rank: Any) -> Any:  # type: ignore[override]
        import quant_calls
        from jax import lax

        from pallas_kernels.dispatch import KernelConfig

        call = self.call
        config = None if call.config is None else KernelConfig(*call.config)
        slots = {"dcp_size": self.ranks, "dcp_rank": rank, "implementation": call.implementation, "config": config}

        def one(buffers: Any, layer: Any) -> Any:
            if self.reads:
                return quant_calls.read(self.rows, buffers, loc, layer=layer, **slots)
            return quant_calls.write(self.rows, buffers, loc, values, layer=layer, skip_slot=0, **slots)

        if self.layers is None:
            return one(buffers, None)
        layers = self.jax.numpy.arange(self.layers)
        if self.reads:
            return lax.scan(lambda carry, layer: (carry, one(buffers, layer)), 0, layers)[1]
        return lax.scan(lambda carry, layer: (one(carry, layer), None), tuple(buffers), layers)[0]

    def _door(self) -> Any:
        import jkv

        jax, call, rows = self.jax, self.call, self.rows
        options: dict[str, Any] = {"size": call.size - 16, "page_size": 16, "layer_num": aot.LAYERS}
        options |= {"mesh": self.mesh, "dcp_axis": "dcp", "stacked": True}
        (heads, first), (_, second) = rows.parts
        if rows.kind == "kv":
            family, dims = jkv.MHATokenToKVPoolFP4, {"head_num": heads, "head_dim": first, "v_head_dim": second}
        else:
            family = jkv.MLATokenToKVPoolFP4 if rows.kind == "mla" else jkv.DSATokenToKVPool
            dims = {"kv_lora_rank": first, "qk_rope_head_dim": second}
        pool = jax.eval_shape(lambda: family.create(**options, **dims))
        pool = jax.tree.map(lambda x, spec: self._aval(x.shape, x.dtype, *spec), pool, pool.partition_specs())
        self.buffers = [x.size * x.dtype.itemsize // self.ranks for x in jax.tree.leaves(pool)]
        loc, layer = self._aval((call.n,), "int32"), self._aval((), "int32")

        def step(pool: Any, layer: Any, loc: Any, values: Any) -> Any:
            if self.reads:
                return pool.get_kv(layer, loc) if rows.kind == "kv" else pool.get_mla_kv_buffer(layer, loc)
            return (pool.set_kv_buffer if rows.kind == "kv" else pool.set_mla_kv_buffer)(layer, loc, *values)

        with jkv.enable_checks():
            donate = () if self.reads else (0,)
            traced = jkv.checked_jit(step, donate_argnums=donate).trace(pool, layer, loc, self._values())
            return traced.lower(lowering_platforms=("cuda",))


if __name__ == "__main__":
    aot.Program, aot.planted = Program, planted  # type: ignore[misc]
    aot.main(sys.argv[1])
