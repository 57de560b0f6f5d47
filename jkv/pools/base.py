"""What every pool family shares: creation, layers and ids, moves, host copies, views."""

import dataclasses
import operator
from typing import Any, ClassVar, NotRequired, Self, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jkv import checks
from jkv.host_copy import HostCopy, kind_of, words_of
from jkv.layout import Buffer, Layout
from jkv.pools import programs
from jkv.ranks import Ranks
from jkv.slots import LayerId, SlotIds, SlotSpace, check_padding_slot, positive_int
from pallas_kernels import codecs, dispatch, index


class PoolOptions(TypedDict):
    """Options of every pool's `create`.

    `start_layer`: the first layer number of this pool (pipeline stages). `mesh`: a jax Mesh, Auto or Explicit.
    `dcp_axis`: the mesh axis, or axes, that tokens are striped over. `tp_axis`: the axis that heads are split over.
    `interleave`: consecutive slot ids on one rank. `stacked`: one array `[layer_num, rows, ...]`, for traced layer ids.
    `padding_slot`: the id of padded rows, 0 or -1.
    """

    start_layer: NotRequired[int]
    mesh: NotRequired[Mesh | AbstractMesh | None]
    dcp_axis: NotRequired[str | tuple[str, ...] | None]
    tp_axis: NotRequired[str | None]
    interleave: NotRequired[int]
    stacked: NotRequired[bool]
    padding_slot: NotRequired[int]


def register(cls: type) -> Any:
    """Class decorator: a frozen dataclass PyTree with a static `layout`, serialisable by `jax.export`."""
    cls = dataclasses.dataclass(frozen=True, repr=False)(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.name != "layout"]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=["layout"])
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jkv.{cls.__name__}",
        serialize_auxdata=lambda aux: aux[0].to_json().encode(),
        deserialize_auxdata=lambda data: (Layout.from_json(bytes(data).decode()),),
    )
    return cls


Scale: TypeAlias = float | jax.Array | np.ndarray | None
"""A divisor of FP8 rows: a positive number, or an array of shape () or (1,)."""


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """What `jax.export.export(step, disabled_checks=...)` must be told for steps that hold a pool's GPU kernels.

    The custom call of Pallas' Triton kernels has no compatibility promise from JAX: load such an export with the JAX
    version that wrote it.
    """
    return [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]


@dataclasses.dataclass(frozen=True)
class Pool:
    """Base of the pools.

    A family adds its buffers as fields, `create`, the doors that write and read tokens, and the three functions below
    that say how rows lie in its buffers.
    """

    layout: Layout
    label: ClassVar[str]
    takes_scales: ClassVar[bool] = True  # in FP8

    @staticmethod
    def _write(layout: Layout, buffers: tuple, loc, rows: tuple, scales: tuple, **options) -> tuple:
        """A rank's new buffers with `rows` written; `options`: `layer` and those of `index.local_row`."""
        raise NotImplementedError

    @staticmethod
    def _read(layout: Layout, buffers: tuple, loc, scales: tuple, *, split: bool, dst_dtype, **options) -> tuple:
        """In a rank: keys and values by slot id, any rank's; or, where `split`, an MLA row's nope and rope."""
        raise NotImplementedError

    @staticmethod
    def _decode(layout: Layout, buffers: tuple) -> tuple:
        """Keys and values of a rank's whole buffers of a layer."""
        raise NotImplementedError

    @classmethod
    def _create(
        cls, buffers: list[Buffer], *, size: int, page_size: int, dtype: np.dtype, layer_num: int, start_layer: int = 0,
        mesh=None, dcp_axis=None, tp_axis=None, interleave: int = 1, stacked: bool = False, padding_slot: int = 0,
        **unknown: Any,
    ) -> Self:  # fmt: skip
        where = cls.__name__
        if unknown:
            known = ", ".join(PoolOptions.__annotations__)
            raise TypeError(f"{where}.create: there is no option {', '.join(unknown)}; the options are {known}")
        if not isinstance(stacked, bool | np.bool_):
            raise ValueError(f"{where}: stacked must be True or False, got {stacked!r}")
        ranks = Ranks.create(mesh, dcp_axis, tp_axis, where)
        check_padding_slot(padding_slot, where)
        start_layer = positive_int(start_layer, where, "start_layer", least=0)
        for buffer in buffers:
            if buffer.split_heads and buffer.heads % ranks.tp_size:
                ways = f"the {ranks.tp_size} ranks of tp_axis {tp_axis!r}"
                raise ValueError(f"{where}: head_num {buffer.heads} must be divisible by {ways}")
        layout = Layout(
            slots=SlotSpace(size, page_size, ranks.dcp_size, interleave),
            dtype=dtype,
            layer_num=positive_int(layer_num, where, "layer_num"),
            start_layer=start_layer,
            stacked=bool(stacked),
            padding_slot=padding_slot,
            ranks=ranks,
            buffers=tuple(buffers),
        )
        fields: dict[str, Any] = {b.name: layout.allocate(b, mesh) for b in buffers}
        return cls(**fields, layout=layout)

    @property
    def slots(self) -> SlotSpace:
        """The slot space: what an id means, and its bound."""
        return self.layout.slots

    @property
    def dtype(self) -> np.dtype:
        """The logical dtype of the rows."""
        return self.layout.dtype

    @property
    def store_dtype(self) -> np.dtype:
        """The unsigned words that the buffers hold."""
        return self.layout.buffers[0].dtype

    @property
    def layer_num(self) -> int:
        """Layers of this pool."""
        return self.layout.layer_num

    @property
    def start_layer(self) -> int:
        """The model's number of this pool's first layer."""
        return self.layout.start_layer

    @property
    def stacked(self) -> bool:
        """Whether each buffer is one array `[layer_num, rows, ...]`."""
        return self.layout.stacked

    @property
    def padding_slot(self) -> int:
        """The id of padded rows."""
        return self.layout.padding_slot

    @property
    def kv_size_bytes(self) -> int:
        """Bytes of the global buffers: all ranks and layers, scales included, replicas over TP counted once."""
        return self.layout.nbytes

    @property
    def arrays(self) -> tuple:
        """For each buffer its array (stacked), or the tuple of its layers' arrays."""
        return tuple(getattr(self, b.name) for b in self.layout.buffers)

    def _with(self, arrays) -> Self:
        return dataclasses.replace(self, **{b.name: a for b, a in zip(self.layout.buffers, arrays, strict=True)})

    def partition_specs(self) -> Self:
        """This pool with a PartitionSpec for every array, for `shard_map` and `jit`."""
        return self._with(self.layout.array_specs)

    def local(self) -> Self:
        """In a caller's shard_map: this rank's part as a pool by itself, whose slot ids are row numbers; -1 is padding.

        For attention to a rank's own rows (`jkv.local_rows`), in any format and at the cost of those rows: its reads
        sum over no axis. Writes go through the pool itself.

        Raises:
          ValueError: not in a shard_map over all of the pool's mesh axes.
        """
        missing = sorted(self.layout.ranks.axes_not_manual())
        if missing:
            raise ValueError(
                f"local ({self.label}): call it in a shard_map over all of the pool's axes, also {missing}"
            )
        return dataclasses.replace(self, layout=self.layout.local())

    def __repr__(self) -> str:
        slots = self.slots
        return (
            f"{type(self).__name__}({kind_of(self.label, self.layout)}, size={slots.size}, "
            f"page_size={slots.page_size}, dcp_size={slots.dcp_size}, {self.kv_size_bytes / 1e6:.1f} MB)"
        )

    def _layer(self, layer_id, door: str) -> tuple[tuple, Any]:
        """Validates a layer id. Returns the arrays that hold the layer, and its index in them (None if not stacked)."""
        layout = self.layout
        first, end = layout.start_layer, layout.start_layer + layout.layer_num
        at: Any
        if isinstance(layer_id, jax.core.Tracer):
            if not layout.stacked:
                raise IndexError(f"{door}: a traced layer_id needs a pool created with stacked=True")
            if layer_id.shape != () or not jnp.issubdtype(layer_id.dtype, jnp.integer):
                raise IndexError(f"{door}: layer_id must be one integer, got {layer_id.dtype}{list(layer_id.shape)}")
            layer_id = layout.ranks.reshard(layer_id, P(), like=self.arrays)
            checks.probe_layer(layer_id, first, layout.layer_num, door)
            at = (layer_id if layer_id.dtype.itemsize > 4 else layer_id.astype(jnp.int32)) - first
        else:
            try:
                if isinstance(layer_id, bool):
                    raise TypeError
                at = operator.index(layer_id) - first
            except TypeError:
                raise IndexError(f"{door}: layer_id must be one integer, got {layer_id!r}") from None
            if not 0 <= at < layout.layer_num:
                raise IndexError(f"{door}: layer_id {layer_id} outside [{first}, {end}), the layers of this pool")
            at = np.int32(at)
        arrays, at = (self.arrays, at) if layout.stacked else (tuple(a[at] for a in self.arrays), None)
        layout.check_arrays(arrays, door)
        return arrays, at

    def _with_layer(self, layer_id, arrays) -> Self:
        """This pool with new arrays for a layer."""
        if self.layout.stacked:
            return self._with(arrays)
        at = operator.index(layer_id) - self.layout.start_layer
        return self._with([(*old[:at], new, *old[at + 1 :]) for old, new in zip(self.arrays, arrays, strict=True)])

    def _ids(
        self, loc, door: str, name: str = "loc", *, label: str | None = None, layer_id=None, distinct: bool = False
    ):
        """Validated slot ids, replicated on an Explicit mesh and, with checks on, probed under `label`."""
        loc = index.as_slot_ids(loc, door, name)
        if isinstance(loc, jax.core.Tracer):
            varying = dispatch.varying_axes(loc) & set(self.layout.ranks.dcp_axis)
            if varying:
                raise ValueError(f"{door}: {name} must be the same on all DCP ranks, it varies over {sorted(varying)}")
        # All that a traced door probes lies on the mesh alike: checkify orders only findings of one type by time.
        on_mesh = jax.tree.leaves(self.arrays) if self.layout.ranks.explicit else []
        if any(isinstance(x, jax.core.Tracer) for x in (loc, *on_mesh)):
            loc = self.layout.ranks.reshard(loc, P(), like=self.arrays)
        elif isinstance(loc, jax.Array) and isinstance(loc.sharding, NamedSharding):
            loc = jax.device_put(loc, NamedSharding(loc.sharding.mesh, P()))
        checks.probe_ids(
            loc,
            label or door,
            bound=self.slots.bound,
            how=self.slots.explain(),
            padding_slot=self.layout.padding_slot,
            layer=layer_id,
            distinct=distinct,
        )
        return loc

    def _scales(self, door: str, scales: dict[str, Any]) -> tuple:
        """Validated scales, given by argument name: what FP8 rows are divided by when written."""
        given = [name for name, scale in scales.items() if scale is not None]
        if given and not self.takes_scales:
            raise ValueError(f"{door}: {given[0]} is for FP8 pools only, {self.label} rows carry scales of their own")
        return tuple(codecs.as_scale(scale, self.dtype, door, name) for name, scale in scales.items())

    def _store(self, door: str, layer_id, loc, rows: dict[str, tuple[Any, int]], scales: dict[str, Any]) -> Self:
        """The path of a door that writes one layer. `rows` and `scales` by argument name; a row with its width."""
        arrays, layer = self._layer(layer_id, door)
        loc = self._ids(loc, door, layer_id=layer_id, distinct=True)
        n, heads = loc.shape[0], self.layout.heads_here(self.layout.buffers[0])
        values = []
        for name, (value, width) in rows.items():
            shapes: list[tuple[int, ...]] = [(n, heads, width)]
            if self.layout.buffers[0].heads == 1:
                shapes.append((n, width))
            values.append(codecs.as_rows(value, shapes, door, name))
            padding = self.layout.padding_slot
            checks.probe_rows(values[-1], loc, door, padding_slot=padding, what=name, layer=layer_id)
        divisors = self._scales(door, scales)
        new = programs.store(type(self), self.layout, arrays, layer, loc, tuple(values), divisors)
        return self._with_layer(layer_id, new)

    def _fetch(self, door: str, layer_id, loc, scales: dict[str, Any], dst_dtype, *, split: bool = False) -> tuple:
        """The path of a door that reads rows of one layer."""
        multipliers = self._scales(door, scales)
        dst_dtype = codecs.as_float_dtype(dst_dtype, door, "dst_dtype")
        arrays, layer = self._layer(layer_id, door)
        loc = self._ids(loc, door, layer_id=layer_id)
        options = {"split": split, "dst_dtype": dst_dtype}
        return programs.fetch(type(self), self.layout, arrays, layer, loc, multipliers, **options)

    def _view(self, door: str, layer_id, *, paged: bool = False) -> tuple[jax.Array, jax.Array]:
        """The path of a door that reads a layer's whole buffers."""
        return programs.view(type(self), self.layout, paged, *self._layer(layer_id, f"{door} ({self.label})"))

    def get_kv_buffer(self, layer_id: LayerId) -> tuple[jax.Array, jax.Array]:
        """The whole K and V buffers of a layer, in the pool's dtype.

        `[dcp_size * rows, heads, dim]`, rank k's rows from `k * rows`; in a shard_map the local part. Of an MLA pool
        the row and its first `kv_lora_rank` columns.

        Raises:
          IndexError: the layer is not one of this pool.
        """
        return self._view("get_kv_buffer", layer_id)

    def get_key_buffer(self, layer_id: LayerId) -> jax.Array:
        """The first of `get_kv_buffer`."""
        return self._view("get_key_buffer", layer_id)[0]

    def get_value_buffer(self, layer_id: LayerId) -> jax.Array:
        """The second of `get_kv_buffer`."""
        return self._view("get_value_buffer", layer_id)[1]

    def get_page_buffer(self, layer_id: LayerId) -> tuple[jax.Array, jax.Array]:
        """`get_kv_buffer` as `[dcp_size * pages, page_size, heads, dim]`, for paged attention kernels."""
        return self._view("get_page_buffer", layer_id, paged=True)

    def move_kv_cache(self, tgt_loc: SlotIds, src_loc: SlotIds) -> Self:
        """Copies the rows of slots `src_loc` to slots `tgt_loc`: all layers and buffers, across ranks.

        Every source is read before any target is written, so the two may overlap. A source out of range reads zeros,
        which are written; a target that is padding or out of range is dropped. Sources may repeat.

        Args:
          tgt_loc, src_loc: `[N]` signed integers.

        Returns:
          The new pool.

        Raises:
          TypeError: ids that are not signed integers. ValueError: lengths differ.
          KVIndexError: with checks on, ids out of range or repeated targets.
        """
        door = f"move_kv_cache ({self.label})"
        self.layout.check_arrays(self.arrays, door)
        tgt = self._ids(tgt_loc, door, "tgt_loc", label=f"{door} tgt_loc", distinct=True)
        src = self._ids(src_loc, door, "src_loc", label=f"{door} src_loc")
        if tgt.shape != src.shape:
            raise ValueError(f"{door}: {tgt.shape[0]} targets in tgt_loc, {src.shape[0]} sources in src_loc")
        return programs.move(self, tgt, src)

    def get_cpu_copy(self, loc: SlotIds) -> HostCopy:
        """The rows of `loc` on the host, all layers and buffers. Waits for them, so that the pool may be donated next.

        With several processes each gets all rows. Ids out of range read zeros, so `loc` may be padded (`jkv.pad_slots`)
        to one length for all copies: `load_cpu_copy` in a jitted step is compiled for each.

        Args:
          loc: `[N]` signed integers, concrete.

        Raises:
          TypeError, KVIndexError: as in `move_kv_cache`. ValueError: called under a trace.
        """
        door = f"get_cpu_copy ({self.label})"
        self.layout.check_arrays(self.arrays, door)
        loc = self._ids(loc, door)
        words = programs.fetch_all(self, loc)
        if any(isinstance(w, jax.core.Tracer) for w in words):
            raise ValueError(f"{door}: copies to the host between steps, not inside a traced function")
        return HostCopy(tuple(np.array(w) for w in words), kind_of(self.label, self.layout))

    def load_cpu_copy(self, host: HostCopy, loc: SlotIds) -> Self:
        """Writes the rows of a host copy to slots `loc`, which need not be those they came from.

        In a jitted step with the pool donated this is in place; `host` is a PyTree. For one compilation, copy with
        `get_cpu_copy(jkv.pad_slots(loc, length))` and load with `jkv.pad_slots(new_loc, length)`.

        Args:
          host: what `get_cpu_copy` returned, of a pool with the same rows and layers (any mesh).
          loc: `[N]` signed integers, one a row; padding and ids out of range are dropped.

        Raises:
          ValueError: a copy from another kind of pool, with other words, or of another number of rows. TypeError,
          KVIndexError: as in `move_kv_cache`.
        """
        door = f"load_cpu_copy ({self.label})"
        self.layout.check_arrays(self.arrays, door)
        ids = self._ids(loc, door, distinct=True)
        words = words_of(host, self.label, self.layout, ids.shape[0], door)
        return self._with(programs.store_all(self, ids, words))
