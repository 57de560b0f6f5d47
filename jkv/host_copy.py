"""Rows of a pool on the host."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jkv.layout import Layout


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """The rows of some slots, all layers and buffers: what `get_cpu_copy` returns and `load_cpu_copy` takes.

    A PyTree, so that a jitted step may restore it into a donated pool.

    Args:
      words: for each buffer of the pool an array `[layers, N, heads, width]` of its words.
      kind: what pools these rows fit: family, dtype, layers and row widths. Slot ids are not part of it.
    """

    words: tuple[Any, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(w.nbytes for w in self.words)


jax.tree_util.register_dataclass(HostCopy, data_fields=["words"], meta_fields=["kind"])


def kind_of(label: str, layout: Layout) -> str:
    """The `kind` of a pool's host copies."""
    rows = ", ".join(f"{b.name} {b.heads}x{'+'.join(map(str, b.parts))}" for b in layout.buffers)
    return f"{label} {layout.dtype.name}, {layout.layer_num} layers from {layout.start_layer}, {rows}"


def words_of(host: HostCopy, label: str, layout: Layout, n: int, door: str) -> tuple[Any, ...]:
    """The words of a host copy that is to fill `n` slots of a pool; NumPy ones are copied.

    Raises:
      ValueError: it is no host copy, of another kind of pool, not of `n` rows, or its words are not those of its kind.
    """
    if not isinstance(host, HostCopy):
        raise ValueError(f"{door}: host must be what get_cpu_copy returned, got {type(host).__name__}")
    if host.kind != (kind := kind_of(label, layout)):
        raise ValueError(f"{door}: the copy is of {host.kind}; this pool holds {kind}")
    if rows := {w.shape[1] for w in host.words if w.ndim > 1} - {n}:
        raise ValueError(f"{door}: loc must name one slot a row: {n} ids, {rows.pop()} rows")
    lead = (layout.layer_num, n)
    expected = [((*lead, *b.row(layout.heads_here(b))), b.dtype) for b in layout.buffers]
    found = [(w.shape, np.dtype(w.dtype)) for w in host.words]
    if found != expected:
        raise ValueError(f"{door}: host holds words {found}, expected {expected}: has something changed them?")
    # The caller may reuse their memory while the restore is in flight.
    return tuple(np.array(w) if isinstance(w, np.ndarray) else w for w in host.words)
