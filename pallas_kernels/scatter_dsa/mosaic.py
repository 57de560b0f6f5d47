"""scatter_dsa in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: codes, scales and rope in one launch.

A rope whose rows are no multiple of 16 bytes is refused: bulk copies do not move it.
"""

from pallas_kernels.codecs import dsa
from pallas_kernels.mosaic import quant
from pallas_kernels.mosaic.plan import Columns, flat


def scatter_dsa(kv_buffer, loc, nope, rope, *, kv_lora_rank, layer, **options):
    lead = 1 if layer is None else 2
    parts = _parts(nope, rope, kv_lora_rank)
    (new,) = quant.scatter("scatter_dsa", [flat(kv_buffer, lead)], parts, loc, layer=layer, **options)
    return new.reshape(kv_buffer.shape)


def unsupported(kv_buffer, loc, nope, rope=None, *, kv_lora_rank, config=None, **options):
    return quant.refusal_of(_parts(nope, rope, kv_lora_rank), config, kv_buffer, loc, nope, rope, options)


def _parts(nope, rope, r):
    behind, at = (nope, r) if rope is None else (rope, 0)
    p, tiles = behind.shape[-1] - at, r // dsa.TILE
    width = dsa.row_bytes(r, p)
    made = Columns(0, 0, r, width, 1, 1), Columns(0, r, 4 * tiles, width, 1, 1)
    kind = quant.Bytes if behind.dtype == "bfloat16" else quant.Rope
    return [
        quant.Tiles(nope, 0, tiles, made),
        kind(behind, at, p, (Columns(0, r + 4 * tiles, 2 * p, width, 1, 1),)),
    ]
