"""A plain NumPy model of a KV pool, to test pools and models built on them against.

The model keeps what the pool promises to keep, in global coordinates and one id at a time: no shards, no JAX indexing
and no arithmetic shared with the library. It mutates in place; a pool does not.

    model = MHAModel(size=8, page_size=4, dtype=jnp.bfloat16, head_num=2, head_dim=4, layer_num=2, dcp_size=4)
    pool, _ = pool.set_kv_buffer(0, loc, k, v), model.set_kv_buffer(0, loc, k, v)
    assert_pool_equals(pool, model)
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # a NumPy or JAX array, or what NumPy makes one of
Parts = dict[str, np.ndarray]
WORDS: dict[int, np.dtype] = {4: np.dtype(np.uint32), 2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}


class PlainCodec:
    """How one row becomes stored words: cast to `dtype`, then the bits as unsigned words of the same width.

    A codec names the parts that a tensor of the pool is stored as, by the suffix of the buffer's name: here one part,
    "". A quantised codec has more, such as "" for the codes and "_scale" for the scales.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.is_fp8 = self.dtype.itemsize == 1

    def parts(self, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and word type of each part of a row of `row_shape`."""
        return {"": (row_shape, WORDS[self.dtype.itemsize])}

    def encode(self, row: np.ndarray, scale: float | None = None) -> Parts:
        """Words of a row of values. FP8: divided by `scale` in float32, clamped to the finite range, cast once."""
        if self.is_fp8:
            largest = np.float32(jnp.finfo(self.dtype).max)
            row = row.astype(np.float32)  # exact from every float type of at most 32 bits
            if scale is not None:
                row = row / np.float32(scale)
            row = np.where(np.isnan(row), row, np.clip(row, -largest, largest))
        with np.errstate(over="ignore"):
            return {"": np.ascontiguousarray(row.astype(self.dtype)).view(WORDS[self.dtype.itemsize])}

    def decode(self, parts: Parts) -> np.ndarray:
        """Values, in `dtype`, of stored words."""
        return parts[""].view(self.dtype)


def deal(size: int, page_size: int, dcp_size: int, interleave: int) -> list[tuple[int, int]]:
    """`(rank, row)` of every logical id: ids go to the ranks in turn, `interleave` at a time, each to its next row."""
    filled = [0] * dcp_size
    places = []
    for loc in range((size + page_size) * dcp_size):
        rank = loc // interleave % dcp_size
        places.append((rank, filled[rank]))
        filled[rank] += 1
    return places


class PoolModel:
    """The buffers of all ranks and layers, and what the pools of every family do in the same way.

    Attributes:
      buffers: `{name: words}`, each `[layer_num, dcp_size * rows, ...]`, named as the pool's own.
      bound: ids run over `0 <= loc < bound`.
      unspecified: `(layer index, id)` of rows that one write addressed twice, whose bytes the contract leaves open.
    """

    def __init__(
        self,
        tensors: dict[str, tuple[int, ...]],
        codec: PlainCodec,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        start_layer: int = 0,
        dcp_size: int = 1,
        interleave: int = 1,
        padding_slot: int = 0,
    ) -> None:
        """`tensors` maps the name of each tensor to the shape of one row's values, over all ranks."""
        self.tensors, self.codec = tensors, codec
        self.page_size, self.layer_num, self.start_layer = page_size, layer_num, start_layer
        self.dcp_size, self.padding_slot = dcp_size, padding_slot
        self.rows = size + page_size
        self.places = deal(size, page_size, dcp_size, interleave)
        self.bound = len(self.places)
        self.unspecified: set[tuple[int, int]] = set()
        self.buffers = {
            name + suffix: np.zeros((layer_num, self.bound, *shape), words)
            for name, row_shape in tensors.items()
            for suffix, (shape, words) in codec.parts(row_shape).items()
        }

    # Which ids are what.

    def is_padding(self, loc: int) -> bool:
        """Whether `loc` is the padding slot, or the id that padded rows carry."""
        return loc in (0, self.padding_slot)

    def bad_ids(self, loc: Array) -> list[int]:
        """Ids that a probe reports: neither padding nor in range."""
        return [i for i in _ids(loc) if not self.is_padding(i) and not 0 <= i < self.bound]

    def written_twice(self, loc: Array) -> list[int]:
        """Distinct ids, in range and not padding, that occur more than once, in ascending order."""
        ids = [i for i in _ids(loc) if 0 < i < self.bound]
        return sorted({i for i in ids if ids.count(i) > 1})

    def index_of(self, loc: int) -> int:
        """The index of id `loc` along the global row axis: rank k's rows come after those of the ranks before it."""
        rank, row = self.places[loc]
        return rank * self.rows + row

    def layer_index(self, layer_id: int) -> int | None:
        """Position of a model's layer in the pool, None where the pool does not hold it."""
        held = range(self.start_layer, self.start_layer + self.layer_num)
        return held.index(int(layer_id)) if int(layer_id) in held else None

    # Rows.

    def _write(self, layer_id: int, loc: Array, rows: dict[str, Array], scales: dict[str, float | None]) -> None:
        layer, ids = self.layer_index(layer_id), _ids(loc)
        if layer is None:
            return
        twice = self.written_twice(ids)
        for n, i in enumerate(ids):
            if not 0 < i < self.bound:
                continue
            self.unspecified.discard((layer, i))
            for name, values in rows.items():
                row = np.asarray(values)[n].reshape(self.tensors[name])
                for suffix, words in self.codec.encode(row, scales.get(name)).items():
                    self.buffers[name + suffix][layer, self.index_of(i)] = words
        self.unspecified.update((layer, i) for i in twice)

    def _stored(self, layer: int | None, loc: int) -> Parts:
        """The words of one row, by buffer: zeros where there is no such row."""
        if layer is None or not 0 <= loc < self.bound:
            return {name: np.zeros_like(buffer[0, 0]) for name, buffer in self.buffers.items()}
        if (layer, loc) in self.unspecified:
            raise ValueError(f"id {loc} of layer {layer + self.start_layer} was written twice: settle the model first")
        return {name: buffer[layer, self.index_of(loc)].copy() for name, buffer in self.buffers.items()}

    def _read(self, layer_id: int, loc: Array, name: str) -> np.ndarray:
        layer = self.layer_index(layer_id)
        suffixes = self.codec.parts(self.tensors[name])
        rows = [self._stored(layer, i) for i in _ids(loc)]
        values = [self.codec.decode({suffix: row[name + suffix] for suffix in suffixes}) for row in rows]
        return np.array(values, self.codec.dtype).reshape((len(rows), *self.tensors[name]))

    def _whole(self, layer_id: int, name: str) -> np.ndarray:
        layer = self.layer_index(layer_id)
        return self.codec.decode({s: self.buffers[name + s][layer] for s in self.codec.parts(self.tensors[name])})

    def _pages(self, values: np.ndarray) -> np.ndarray:
        return values.reshape((self.bound // self.page_size, self.page_size, *values.shape[1:]))

    def move_kv_cache(self, tgt_loc: Array, src_loc: Array) -> None:
        """Copies rows between ids in all layers. All sources are read before any target is written."""
        targets, layers = _ids(tgt_loc), range(self.layer_num)
        read = [[self._stored(layer, i) for i in _ids(src_loc)] for layer in layers]
        for layer in layers:
            self._store(layer, targets, read[layer])

    def _store(self, layer: int, targets: Sequence[int], rows: Sequence[Parts]) -> None:
        for i, row in zip(targets, rows, strict=True):
            if 0 < i < self.bound:
                self.unspecified.discard((layer, i))
                for name, words in row.items():
                    self.buffers[name][layer, self.index_of(i)] = words
        self.unspecified.update((layer, i) for i in self.written_twice(targets))

    def get_cpu_copy(self, loc: Array) -> list[list[Parts]]:
        """The stored words of some ids: `[layer][n]`."""
        return [[self._stored(layer, i) for i in _ids(loc)] for layer in range(self.layer_num)]

    def load_cpu_copy(self, host: list[list[Parts]], loc: Array) -> None:
        """Stores what `get_cpu_copy` returned at other ids."""
        for layer, rows in enumerate(host):
            self._store(layer, _ids(loc), rows)

    def settle(self, pool: Any) -> None:
        """Takes over from `pool` the bytes of the rows that were written twice."""
        for layer, i in self.unspecified:
            for name, buffer in self.buffers.items():
                buffer[layer, self.index_of(i)] = _layer(pool, name, layer)[self.index_of(i)]
        self.unspecified.clear()


class MHAModel(PoolModel):
    """What `MHATokenToKVPool` promises. `head_num` counts the heads of all tensor-parallel ranks together."""

    def __init__(
        self, *, dtype: Any, head_num: int, head_dim: int, v_head_dim: int | None = None, **geometry: Any
    ) -> None:
        v_row = (head_num, v_head_dim or head_dim)
        super().__init__({"k_buffer": (head_num, head_dim), "v_buffer": v_row}, PlainCodec(dtype), **geometry)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: Array,
        cache_k: Array,
        cache_v: Array,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Writes rows `[N, head_num, head_dim]` and `[N, head_num, v_head_dim]`."""
        scales = {"k_buffer": k_scale, "v_buffer": v_scale}
        self._write(layer_id, loc, {"k_buffer": cache_k, "v_buffer": cache_v}, scales)

    def get_kv(
        self,
        layer_id: int,
        loc: Array,
        k_scale: float | None = None,
        v_scale: float | None = None,
        dst_dtype: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows by id. With a scale: times it in float32, to bfloat16 or `dst_dtype`."""
        k, v = self._read(layer_id, loc, "k_buffer"), self._read(layer_id, loc, "v_buffer")
        return _scaled(k, k_scale, dst_dtype), _scaled(v, v_scale, dst_dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Whole buffers `[dcp_size * rows, ...]`, in the pool's dtype."""
        return self._whole(layer_id, "k_buffer"), self._whole(layer_id, "v_buffer")

    def get_page_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as `[dcp_size * pages, page_size, ...]`."""
        k, v = self.get_kv_buffer(layer_id)
        return self._pages(k), self._pages(v)


class MLAModel(PoolModel):
    """What `MLATokenToKVPool` promises: one row of `kv_lora_rank` latent and then `qk_rope_head_dim` rope values."""

    def __init__(self, *, dtype: Any, kv_lora_rank: int, qk_rope_head_dim: int, **geometry: Any) -> None:
        self.rank = kv_lora_rank
        super().__init__({"kv_buffer": (1, kv_lora_rank + qk_rope_head_dim)}, PlainCodec(dtype), **geometry)

    def set_kv_buffer(self, layer_id: int, loc: Array, cache_k: Array, k_scale: float | None = None) -> None:
        """Writes whole rows `[N, 1, kv_lora_rank + qk_rope_head_dim]`."""
        self._write(layer_id, loc, {"kv_buffer": cache_k}, {"kv_buffer": k_scale})

    def set_mla_kv_buffer(
        self, layer_id: int, loc: Array, cache_k_nope: Array, cache_k_rope: Array, k_scale: float | None = None
    ) -> None:
        """Writes rows given in two pieces, `[N, 1, kv_lora_rank]` and `[N, 1, qk_rope_head_dim]`."""
        nope, rope = np.asarray(cache_k_nope), np.asarray(cache_k_rope)
        rows = [np.concatenate([nope[n].reshape(-1), rope[n].reshape(-1)]) for n in range(len(nope))]
        self._write(layer_id, loc, {"kv_buffer": rows}, {"kv_buffer": k_scale})

    def get_kv(
        self, layer_id: int, loc: Array, k_scale: float | None = None, dst_dtype: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whole rows by id, and their first `kv_lora_rank` values."""
        row = _scaled(self._read(layer_id, loc, "kv_buffer"), k_scale, dst_dtype)
        return row, row[..., : self.rank]

    def get_mla_kv_buffer(
        self, layer_id: int, loc: Array, dst_dtype: Any = None, k_scale: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows by id in two pieces."""
        row = _scaled(self._read(layer_id, loc, "kv_buffer"), k_scale, dst_dtype)
        return row[..., : self.rank], row[..., self.rank :]

    def get_kv_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The whole buffer `[dcp_size * rows, 1, ...]`, and its first `kv_lora_rank` columns."""
        whole = self._whole(layer_id, "kv_buffer")
        return whole, whole[..., : self.rank]

    def get_page_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as `[dcp_size * pages, page_size, ...]`."""
        k, v = self.get_kv_buffer(layer_id)
        return self._pages(k), self._pages(v)


def model_like(pool: Any) -> MHAModel | MLAModel:
    """An empty model with the geometry of `pool` (an MHA or MLA pool of one of the plain dtypes)."""
    slots = pool.slots
    geometry = {
        "size": slots.size,
        "page_size": slots.page_size,
        "dcp_size": slots.dcp_size,
        "interleave": slots.interleave,
        "padding_slot": pool.padding_slot,
        "layer_num": pool.layer_num,
        "start_layer": pool.start_layer,
        "dtype": pool.dtype,
    }
    if hasattr(pool, "kv_lora_rank"):
        return MLAModel(kv_lora_rank=pool.kv_lora_rank, qk_rope_head_dim=pool.qk_rope_head_dim, **geometry)
    return MHAModel(head_num=pool.head_num, head_dim=pool.head_dim, v_head_dim=pool.v_head_dim, **geometry)


def assert_pool_equals(pool: Any, model: PoolModel) -> None:
    """Compares every row of every buffer of a pool with the model, bit for bit.

    Rows that one write addressed twice are left out until `model.settle(pool)`.

    Raises:
      AssertionError: names the buffer, the layer, the ids whose rows differ, and the first differing word.
    """
    for name, expected in model.buffers.items():
        for layer in range(model.layer_num):
            got, want = _layer(pool, name, layer), expected[layer]
            if got.shape != want.shape or got.dtype != want.dtype:
                raise AssertionError(f"{name}: expected {want.dtype}{want.shape} a layer, got {got.dtype}{got.shape}")
            differs = (got != want).reshape(len(want), -1).any(axis=1)
            ids = [i for i in range(model.bound) if differs[model.index_of(i)] and (layer, i) not in model.unspecified]
            if ids:
                at = model.index_of(ids[0])
                word = tuple(int(i) for i in np.argwhere(got[at] != want[at])[0])
                raise AssertionError(
                    f"{name}, layer {layer + model.start_layer}: rows of slot ids {ids[:16]} differ; id {ids[0]} is "
                    f"(rank, row) {model.places[ids[0]]}, its word {word} is {got[at][word]:#x}, "
                    f"expected {want[at][word]:#x}"
                )


def assert_invariants(pool: Any) -> None:
    """What holds for every pool at any time, whatever was done to it.

    The padding slot's row is zero in every buffer and layer, the bytes that the pool states are those of its arrays,
    and arrays on a mesh lie as `partition_specs` says.

    Raises:
      AssertionError: names the leaf that breaks one of these.
    """
    total = 0
    specs = pool.partition_specs()
    for field in dataclasses.fields(pool):
        value, spec = getattr(pool, field.name), getattr(specs, field.name)
        leaves = [(x, s) for x, s in zip(_as_list(value), _as_list(spec), strict=True) if isinstance(x, jax.Array)]
        for leaf, leaf_spec in leaves:
            total += leaf.nbytes
            sharding = leaf.sharding
            if isinstance(sharding, jax.sharding.NamedSharding):
                stated = jax.sharding.NamedSharding(sharding.mesh, leaf_spec)
                if not sharding.is_equivalent_to(stated, leaf.ndim):
                    raise AssertionError(f"{field.name}: lies as {sharding.spec}, partition_specs says {leaf_spec}")
            words = np.asarray(leaf)
            if (words[0] if isinstance(value, tuple) else words[:, 0]).any():
                raise AssertionError(f"{field.name}: the padding slot's row is not zero")
    if total != pool.kv_size_bytes:
        raise AssertionError(f"kv_size_bytes says {pool.kv_size_bytes}, the arrays have {total}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if type(value) in (tuple, list) else [value]


def _ids(loc: Array | Iterable[int]) -> list[int]:
    return [int(i) for i in np.asarray(loc).reshape(-1)]


def _layer(pool: Any, name: str, layer: int) -> np.ndarray:
    array = getattr(pool, name)
    return np.asarray(array[layer]) if isinstance(array, tuple) else np.asarray(array)[layer]


def _scaled(values: np.ndarray, scale: float | None, dst_dtype: Any) -> np.ndarray:
    if scale is not None:
        product = values.astype(np.float32) * np.float32(scale)
        return product.astype(np.dtype(dst_dtype or jnp.bfloat16))
    return values if dst_dtype is None else values.astype(np.dtype(dst_dtype))
