"""Rows of a pool on the host."""

import dataclasses
from typing import Any

import jax

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
