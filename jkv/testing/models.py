"""What the pools promise, in plain NumPy."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.testing.codecs import Codec, DSACodec, FP4Codec, Parts, PlainCodec

Array = Any  # a NumPy or JAX array, or what NumPy makes one of


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
        codec: Codec,
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
            f"{name}_{part}": np.zeros((layer_num, self.bound, *shape), words)
            for name, row_shape in tensors.items()
            for part, (shape, words) in codec.parts(row_shape).items()
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
                for part, words in self.codec.encode(row, scales.get(name)).items():
                    self.buffers[f"{name}_{part}"][layer, self.index_of(i)] = words
        self.unspecified.update((layer, i) for i in twice)

    def _stored(self, layer: int | None, loc: int) -> Parts:
        """The words of one row, by buffer: zeros where there is no such row."""
        if layer is None or not 0 <= loc < self.bound:
            return {name: np.zeros_like(buffer[0, 0]) for name, buffer in self.buffers.items()}
        if (layer, loc) in self.unspecified:
            raise ValueError(f"id {loc} of layer {layer + self.start_layer} was written twice: settle the model first")
        return {name: buffer[layer, self.index_of(loc)].copy() for name, buffer in self.buffers.items()}

    def _read(
        self, layer_id: int, loc: Array, name: str, scale: float | None = None, dst_dtype: Any = None
    ) -> np.ndarray:
        """Rows by id; with a scale times it in float32, as bfloat16 or `dst_dtype`."""
        layer = self.layer_index(layer_id)
        rows = [self._stored(layer, i) for i in _ids(loc)]
        values = [
            self.codec.decode({p: row[f"{name}_{p}"] for p in self.codec.parts(self.tensors[name])}) for row in rows
        ]
        array = np.array(values).reshape((len(rows), *self.tensors[name]))
        if scale is not None:
            array = array.astype(np.float32) * np.float32(scale)
        return array.astype(np.dtype(dst_dtype or (self.codec.dtype if scale is None else jnp.bfloat16)))

    def _whole(self, layer_id: int, name: str) -> np.ndarray:
        layer, parts = self.layer_index(layer_id), self.codec.parts(self.tensors[name])
        return self.codec.decode({p: self.buffers[f"{name}_{p}"][layer] for p in parts}).astype(self.codec.dtype)

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
                buffer[layer, self.index_of(i)] = layer_words(pool, name, layer)[self.index_of(i)]
        self.unspecified.clear()


class MHAModel(PoolModel):
    """What `MHATokenToKVPool` promises, and with an `FP4Codec` for `dtype` what `MHATokenToKVPoolFP4` does.

    `head_num` counts the heads of all tensor-parallel ranks together.
    """

    def __init__(
        self, *, dtype: Any, head_num: int, head_dim: int, v_head_dim: int | None = None, **geometry: Any
    ) -> None:
        v_row = (head_num, v_head_dim or head_dim)
        super().__init__({"k": (head_num, head_dim), "v": v_row}, _codec(dtype), **geometry)

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
        self._write(layer_id, loc, {"k": cache_k, "v": cache_v}, {"k": k_scale, "v": v_scale})

    def get_kv(
        self,
        layer_id: int,
        loc: Array,
        k_scale: float | None = None,
        v_scale: float | None = None,
        dst_dtype: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows by id. With a scale: times it in float32, to bfloat16 or `dst_dtype`."""
        k = self._read(layer_id, loc, "k", k_scale, dst_dtype)
        return k, self._read(layer_id, loc, "v", v_scale, dst_dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Whole buffers `[dcp_size * rows, ...]`, in the pool's dtype."""
        return self._whole(layer_id, "k"), self._whole(layer_id, "v")

    def get_page_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as `[dcp_size * pages, page_size, ...]`."""
        k, v = self.get_kv_buffer(layer_id)
        return self._pages(k), self._pages(v)


class MLAModel(PoolModel):
    """What `MLATokenToKVPool` promises: one row of `kv_lora_rank` latent and then `qk_rope_head_dim` rope values.

    With an `FP4Codec` or a `DSACodec` for `dtype` it is what `MLATokenToKVPoolFP4` or `DSATokenToKVPool` promises.
    """

    def __init__(self, *, dtype: Any, kv_lora_rank: int, qk_rope_head_dim: int, **geometry: Any) -> None:
        self.rank = kv_lora_rank
        super().__init__({"kv": (1, kv_lora_rank + qk_rope_head_dim)}, _codec(dtype), **geometry)

    def set_kv_buffer(self, layer_id: int, loc: Array, cache_k: Array, k_scale: float | None = None) -> None:
        """Writes whole rows `[N, 1, kv_lora_rank + qk_rope_head_dim]`."""
        self._write(layer_id, loc, {"kv": cache_k}, {"kv": k_scale})

    def set_mla_kv_buffer(
        self, layer_id: int, loc: Array, cache_k_nope: Array, cache_k_rope: Array, k_scale: float | None = None
    ) -> None:
        """Writes rows given in two pieces, `[N, 1, kv_lora_rank]` and `[N, 1, qk_rope_head_dim]`."""
        nope, rope = np.asarray(cache_k_nope), np.asarray(cache_k_rope)
        rows = [np.concatenate([nope[n].reshape(-1), rope[n].reshape(-1)]) for n in range(len(nope))]
        self._write(layer_id, loc, {"kv": rows}, {"kv": k_scale})

    def get_kv(
        self, layer_id: int, loc: Array, k_scale: float | None = None, dst_dtype: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whole rows by id, and their first `kv_lora_rank` values."""
        row = self._read(layer_id, loc, "kv", k_scale, dst_dtype)
        return row, row[..., : self.rank]

    def get_mla_kv_buffer(
        self, layer_id: int, loc: Array, dst_dtype: Any = None, k_scale: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows by id in two pieces."""
        row = self._read(layer_id, loc, "kv", k_scale, dst_dtype)
        return row[..., : self.rank], row[..., self.rank :]

    def get_kv_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The whole buffer `[dcp_size * rows, 1, ...]` (of a DSA pool bytes), and its first `kv_lora_rank` columns."""
        raw = isinstance(self.codec, DSACodec)
        whole = self.buffers["kv_buffer"][self.layer_index(layer_id)] if raw else self._whole(layer_id, "kv")
        return whole, whole[..., : self.rank]

    def get_page_buffer(self, layer_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as `[dcp_size * pages, page_size, ...]`."""
        k, v = self.get_kv_buffer(layer_id)
        return self._pages(k), self._pages(v)


def model_like(pool: Any) -> MHAModel | MLAModel:
    """An empty model with the format and geometry of `pool`."""
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
    if pool.label == "DSA":
        geometry["dtype"] = DSACodec(pool.kv_lora_rank)
    elif pool.label.endswith("FP4"):
        geometry["dtype"] = FP4Codec()
    if hasattr(pool, "kv_lora_rank"):
        return MLAModel(kv_lora_rank=pool.kv_lora_rank, qk_rope_head_dim=pool.qk_rope_head_dim, **geometry)
    return MHAModel(head_num=pool.head_num, head_dim=pool.head_dim, v_head_dim=pool.v_head_dim, **geometry)


def _codec(dtype: Any) -> Codec:
    return dtype if isinstance(dtype, FP4Codec | DSACodec) else PlainCodec(dtype)


def layer_words(pool: Any, name: str, layer: int) -> np.ndarray:
    """The words of one layer of a pool's buffer, on the host."""
    array = getattr(pool, name)
    return np.asarray(array[layer]) if isinstance(array, tuple) else np.asarray(array)[layer]


def _ids(loc: Array | Iterable[int]) -> list[int]:
    return [int(i) for i in np.asarray(loc).reshape(-1)]
