"""gather_rows in Triton: all buffers in one launch, both parts of an MLA row included."""

import dataclasses
import math
from typing import Any

from pallas_kernels import triton


def _plan(buffers, layer, split):
    """A range of columns for each part that the kernel tells apart: of one head, since only there they are ranges."""
    lead = 1 if layer is None else 2
    columns = []
    for buffer, whole in zip(buffers, triton.whole_rows(buffers, lead), strict=True):
        if split is None or split == buffer.shape[-1] or math.prod(buffer.shape[lead:-1]) > 1:
            columns.append([whole])
        else:
            rest = dataclasses.replace(whole, start=split, width=whole.width - split)
            columns.append([dataclasses.replace(whole, width=split), rest])
    return lead, columns


def unsupported(buffers, loc, *, layer=None, split=None, config=None, **_):
    lead, columns = _plan(buffers, layer, split)
    return triton.refusal(buffers, [c for own in columns for c in own], loc.shape[0], lead, config)


def gather_rows(buffers, loc, *, layer, split, config, interpret, **slots):
    lead, columns = _plan(buffers, layer, split)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    parts = iter(triton.move("gather_rows", buffers, loc, [c for own in columns for c in own], None, **options))
    results: list[Any] = []
    for buffer, own in zip(buffers, columns, strict=True):
        shape = loc.shape[0], *buffer.shape[lead:-1]
        rows = [next(parts).reshape(*shape, buffer.shape[-1] if len(own) == 1 else c.width) for c in own]
        if split is None:
            results.append(rows[0])
        else:
            results.append(tuple(rows) if len(rows) == 2 else (rows[0][..., :split], rows[0][..., split:]))
    return tuple(results)
