"""How many tokens fit into memory: bytes of a token, and the largest pool for a number of bytes."""

import dataclasses
import math
import operator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jkv.layout import Layout
from jkv.pools.base import Pool
from jkv.slots import SlotSpace, positive_int


@dataclasses.dataclass(frozen=True, init=False)
class PoolSpec:
    """A pool that is not there yet: its class and all options of its `create` but `size` and `page_size`.

    `mesh` may be an AbstractMesh, to plan for devices that are not here.

    Raises:
      ValueError: no pool class, a size among the options, or what `create` says of the options.
      TypeError: options that `create` does not have, or lacks.
    """

    pool_class: Any
    options: dict[str, Any]

    def __init__(self, pool_class: Any, **options: Any):
        if not (isinstance(pool_class, type) and issubclass(pool_class, Pool)) or pool_class is Pool:
            raise ValueError(f"PoolSpec: expected a pool class such as jkv.MHATokenToKVPool, got {pool_class!r}")
        for name in {"size", "page_size"} & set(options):
            raise ValueError(f"PoolSpec: {name} is no part of a spec; pass it to create, or page_size to max_tokens")
        object.__setattr__(self, "pool_class", pool_class)
        object.__setattr__(self, "options", options)
        _layout(self)

    def __hash__(self) -> int:
        return hash((self.pool_class, frozenset(self.options.items())))

    def abstract(self, size: int, page_size: int) -> Any:
        """The pool with a `jax.ShapeDtypeStruct` for every array: it answers for sizes and takes no memory."""
        return jax.eval_shape(lambda: self.create(size, page_size))

    def create(self, size: int, page_size: int) -> Any:
        """The pool itself, empty: `pool_class.create` with these sizes and the spec's options."""
        return self.pool_class.create(size=size, page_size=page_size, **self.options)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What `max_tokens` found.

    Args:
      per_rank: tokens that one DCP rank holds: the `size` to create the pool with.
      aggregate: tokens that all DCP ranks hold, `per_rank * dcp_size`: what an allocator hands out.
      bytes_per_rank: bytes of that pool on one device, the padding page included.
      limit: what keeps it from being a page larger: "memory", or "int32" where slot ids end first (x64 is off).
    """

    per_rank: int
    aggregate: int
    bytes_per_rank: int
    limit: str


def _layout(of: Any) -> Layout:
    if isinstance(of, PoolSpec):
        page_size = of.options.get("interleave", 1)  # the smallest that it divides
        return of.abstract(page_size, page_size).layout
    return of.layout


def _row_bytes(of: Any, where: str, *, per_rank: bool) -> tuple[Layout, int]:
    """The layout, and the bytes of one row of all layers: whole, or the part on one of the devices that hold it."""
    if not isinstance(of, Pool | PoolSpec):
        raise ValueError(f"{where}: expected a pool, an abstract pool or a jkv.PoolSpec, got {of!r}")
    layout = _layout(of)
    mesh = layout.ranks.mesh
    if not per_rank or mesh is None:
        return layout, layout.nbytes // layout.slots.bound
    nbytes = 0
    for buffer in layout.buffers:
        shape = NamedSharding(mesh, layout.spec(buffer)).shard_shape(layout.shape(buffer))
        nbytes += math.prod(shape) * buffer.dtype.itemsize * (1 if layout.stacked else layout.layer_num)
    return layout, nbytes // layout.slots.rows


def bytes_per_token(pool: Any, *, per_rank: bool = False) -> int:
    """Bytes that one token takes over all layers of a pool, scales included.

    Args:
      pool: a pool, an abstract one (of `jax.eval_shape`), or a `PoolSpec`.
      per_rank: the bytes on one device that stores the token: heads are split over `tp_axis`, MLA rows replicated.
        Otherwise of the whole token, replicas counted once: `kv_size_bytes == bytes_per_token(pool) * slots.bound`.

    Raises:
      ValueError: `pool` is none of these.
    """
    return _row_bytes(pool, "bytes_per_token", per_rank=per_rank)[1]


def max_tokens(
    memory_bytes: int, spec: Any, *, page_size: int, dcp_size: int | None = None, extra_bytes_per_token: int = 0
) -> Capacity:
    """The largest pool whose part on one device fits into `memory_bytes`, to the page.

    The padding page counts: `size` is the largest multiple of `page_size` for which `size + page_size` rows of all
    layers fit. Where slot ids would not fit int32 and x64 is off, it is the largest whose ids do.

    Args:
      memory_bytes: what one device has for the pool.
      spec: a `PoolSpec`, or a pool or abstract pool (whose own size does not matter).
      page_size: tokens of a page on one rank.
      dcp_size: ranks that share the tokens; only for a spec without a mesh, as a mesh says it.
      extra_bytes_per_token: what each row takes on the device beside the pool, such as the keys of an index.

    Raises:
      ValueError: memory for less than one page and the padding page; one page's slot ids exceed int32; a `dcp_size`
        that is not the mesh's; sizes that are no integers, not positive, or do not divide.
    """
    layout, row_bytes = _row_bytes(spec, "max_tokens", per_rank=True)
    page_size = positive_int(page_size, "max_tokens", "page_size")
    if dcp_size is None:
        dcp_size = layout.slots.dcp_size
    elif layout.ranks.mesh is not None and dcp_size != layout.slots.dcp_size:
        raise ValueError(f"max_tokens: dcp_size {dcp_size!r}, but the spec's mesh has {layout.slots.dcp_size}")
    else:
        dcp_size = positive_int(dcp_size, "max_tokens", "dcp_size")
    row_bytes += positive_int(extra_bytes_per_token, "max_tokens", "extra_bytes_per_token", least=0)
    try:
        memory_bytes = operator.index(memory_bytes)
    except TypeError:
        raise ValueError(f"max_tokens: memory_bytes must be an integer, got {memory_bytes!r}") from None

    page_bytes = page_size * row_bytes
    by_memory = memory_bytes // page_bytes - 1
    if by_memory < 1:
        need = f"one page of {page_size} tokens and the padding page take {2 * page_bytes} bytes on a device"
        raise ValueError(f"max_tokens: memory_bytes {memory_bytes} hold no token: {need}")
    # Where even one page is too many ids, SlotSpace says so.
    by_ids = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64)).max // (page_size * dcp_size) - 1
    slots = SlotSpace(max(1, min(by_memory, by_ids)) * page_size, page_size, dcp_size, layout.slots.interleave)
    return Capacity(
        per_rank=slots.size,
        aggregate=slots.capacity,
        bytes_per_rank=slots.rows * (row_bytes - extra_bytes_per_token),
        limit="memory" if by_memory <= by_ids else "int32",
    )
