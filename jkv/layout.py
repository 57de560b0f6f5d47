"""What buffers a pool has: shapes, words, bytes and sharding."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jkv.ranks import Ranks
from jkv.slots import SlotSpace


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer of every layer: `[rows, heads, sum(parts)]` words on a rank.

    Args:
      name: the pool's field.
      heads: size of the middle axis over all TP ranks.
      parts: widths along the last axis, in order (an MLA row: nope, rope).
      dtype: the unsigned word.
      split_heads: whether TP ranks share the heads; otherwise each holds all.
      flat: whether the heads lie one behind the other in one axis, `[rows, heads * sum(parts)]` (scales of FP4 rows).
    """

    name: str
    heads: int
    parts: tuple[int, ...]
    dtype: np.dtype
    split_heads: bool = False
    flat: bool = False

    @property
    def width(self) -> int:
        """Words of one head of a row."""
        return sum(self.parts)

    def row(self, heads: int) -> tuple[int, ...]:
        """Shape of a row of so many heads."""
        return (heads * self.width,) if self.flat else (heads, self.width)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static of a pool: hashable, so that it may be part of a compilation key."""

    slots: SlotSpace
    dtype: np.dtype
    layer_num: int
    start_layer: int
    stacked: bool
    padding_slot: int
    ranks: Ranks
    buffers: tuple[Buffer, ...]

    def shape(self, buffer: Buffer) -> tuple[int, ...]:
        """Global shape of one array of `buffer`: a layer's, or all layers' when stacked."""
        rows = (self.slots.bound, *buffer.row(buffer.heads))
        return (self.layer_num, *rows) if self.stacked else rows

    def shape_here(self, buffer: Buffer) -> tuple[int, ...]:
        """Shape of that array where the caller stands: the global one, or in a shard_map the local one."""
        row = (self.slots.bound // self.ranks.split_here()[0], *buffer.row(self.heads_here(buffer)))
        return (self.layer_num, *row) if self.stacked else row

    def heads_here(self, buffer: Buffer) -> int:
        """Heads of `buffer` where the caller stands."""
        return buffer.heads // self.ranks.split_here()[1] if buffer.split_heads else buffer.heads

    def check_arrays(self, arrays: tuple, door: str) -> None:
        """ValueError unless `arrays`, for each buffer one or a tuple of them, are a pool's part of where we stand."""
        mesh = self.ranks.mesh
        if wrong := self.ranks.misopened():
            raise ValueError(f"{door}: {wrong}")
        for buffer, some in zip(self.buffers, arrays, strict=True):
            expected = self.shape_here(buffer)
            for array in jax.tree.leaves(some):
                if array.shape != expected:
                    raise ValueError(
                        f"{door}: {buffer.name} has shape {array.shape} here, expected {expected}; "
                        "pass the pool in and out of a shard_map with pool.partition_specs()"
                    )
                if mesh is None or isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
                    continue
                if (found := len(array.sharding.device_set)) != mesh.size:
                    raise ValueError(
                        f"{door}: {buffer.name} lies on {found} of the {mesh.size} devices of its mesh; "
                        "place each array by a NamedSharding of its part of pool.partition_specs()"
                    )

    @property
    def row_spec(self) -> P:
        """Sharding of `[N, heads, ...]` rows, of any buffer: a pool's buffers split their heads all or none."""
        return P(None, self.ranks.tp_axis) if self.buffers[0].split_heads else P()

    def layer_spec(self, buffer: Buffer) -> P:
        """Sharding of `[dcp_size * rows, heads, width]`."""
        return P(self.ranks.dcp, self.ranks.tp_axis) if buffer.split_heads else P(self.ranks.dcp)

    def spec(self, buffer: Buffer) -> P:
        """Sharding of one array of `buffer`."""
        return P(None, *self.layer_spec(buffer)) if self.stacked else self.layer_spec(buffer)

    @property
    def specs(self) -> tuple[P, ...]:
        """`spec` of every buffer."""
        return tuple(map(self.spec, self.buffers))

    @property
    def array_specs(self) -> tuple[P | tuple[P, ...], ...]:
        """For each buffer the sharding of its one array, or of each layer's: as a pool's `arrays` are."""
        return self.specs if self.stacked else tuple((spec,) * self.layer_num for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of the global arrays of all buffers and layers; replicas over TP counted once."""
        arrays = 1 if self.stacked else self.layer_num
        return sum(arrays * math.prod(self.shape(b)) * b.dtype.itemsize for b in self.buffers)

    def local(self) -> "Layout":
        """Of one rank's part by itself: without a mesh, its slot ids the numbers of its rows; -1 is padding."""
        slots = SlotSpace(self.slots.size, self.slots.page_size)
        buffers = tuple(dataclasses.replace(b, heads=self.heads_here(b)) for b in self.buffers)
        return dataclasses.replace(self, slots=slots, ranks=Ranks(), buffers=buffers, padding_slot=-1)

    def slot_options(self, rank) -> dict:
        """The slot space as options of the `pallas_kernels` ops."""
        return {"dcp_size": self.slots.dcp_size, "dcp_rank": rank, "interleave": self.slots.interleave}

    def allocate(self, buffer: Buffer, mesh):
        """Zeros for `buffer`: one array, or a tuple of one a layer; sharded at once, never on one device first."""

        def zeros(where: str):
            shape = self.shape(buffer)
            try:
                return _zeros(shape, buffer.dtype, mesh, self.spec(buffer))
            except jax.errors.JaxRuntimeError as error:
                gigabytes = math.prod(shape) * buffer.dtype.itemsize / 1e9
                message = f"no memory for {buffer.name} of {where}: {shape} {buffer.dtype}, {gigabytes:.3f} GB in all"
                raise MemoryError(f"{message} ranks, of a pool of {self.nbytes / 1e9:.3f} GB") from error

        if self.stacked:
            return zeros(f"{self.layer_num} layers")
        return tuple(zeros(f"layer {self.start_layer + i}") for i in range(self.layer_num))

    def to_json(self) -> str:
        """As text, for `jax.export`."""
        plain = dataclasses.asdict(self)
        mesh = self.ranks.mesh
        plain["dtype"] = self.dtype.name
        for buffer in plain["buffers"]:
            buffer["dtype"] = buffer["dtype"].name
        plain["ranks"]["mesh"] = mesh and [mesh.axis_sizes, mesh.axis_names, [t.name for t in mesh.axis_types]]
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """The inverse of `to_json`."""
        plain = json.loads(text)
        ranks, mesh = plain["ranks"], plain["ranks"]["mesh"]
        if mesh:
            types = tuple(AxisType[t] for t in mesh[2])
            mesh = AbstractMesh(tuple(mesh[0]), tuple(mesh[1]), axis_types=types)
        plain["ranks"] = Ranks(mesh, tuple(ranks["dcp_axis"]), ranks["tp_axis"])
        plain["slots"] = SlotSpace(**plain["slots"])
        plain["dtype"] = jnp.dtype(plain["dtype"])
        plain["buffers"] = tuple(
            Buffer(**(b | {"parts": tuple(b["parts"]), "dtype": jnp.dtype(b["dtype"])})) for b in plain["buffers"]
        )
        return cls(**plain)


def _zeros(shape, dtype, mesh, spec):
    """Zeros laid out over `mesh`, eagerly and under a trace alike."""
    if mesh is None:
        return jnp.zeros(shape, dtype)
    sharding = NamedSharding(mesh, spec)
    if not isinstance(jnp.zeros(()), jax.core.Tracer):  # eagerly: under a trace `device` is dropped
        if isinstance(mesh, AbstractMesh):
            raise ValueError("create: an AbstractMesh has no devices to allocate on; call it under jax.eval_shape")
        return jnp.zeros(shape, dtype, device=sharding)
    if AxisType.Explicit in mesh.axis_types:
        return jnp.zeros(shape, dtype, out_sharding=sharding)
    return lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)
