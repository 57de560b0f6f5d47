"""gather_dsa in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: codes, scales and rope to floats in one launch.

It reads rows as 32-bit words, and refuses those that are not: a rope with an odd number of elements.
"""

from pallas_kernels.codecs import dsa
from pallas_kernels.mosaic import dequant
from pallas_kernels.mosaic.plan import Columns
from pallas_kernels.mosaic.units import words_of


def gather_dsa(kv_buffer, loc, *, kv_lora_rank, dtype, layer, **options):
    parts, words = _parts(kv_buffer, kv_lora_rank, dtype), words_of(kv_buffer, 1 if layer is None else 2)
    nope, rope = dequant.gather("gather_dsa", [words], parts, loc, layer=layer, **options)
    return nope[:, None], rope[:, None]


def unsupported(kv_buffer, loc, *, kv_lora_rank, dtype="bfloat16", config=None, **options):
    if kv_buffer.shape[-1] % 4:
        return f"it reads rows as 32-bit words, which {kv_buffer.shape[-1]} bytes are not"
    return dequant.refusal_of(_parts(kv_buffer, kv_lora_rank, dtype), config, kv_buffer, loc, options)


def _parts(kv_buffer, r, dtype):
    width, tiles = kv_buffer.shape[-1] // 4, r // dsa.TILE
    rope = r // 4 + tiles
    taken = Columns(0, 0, r // 4, width, 4, 4), Columns(0, r // 4, tiles, width, 4, 4)
    return [
        dequant.Tiles(taken, tiles, dtype),
        dequant.Rope((Columns(0, rope, width - rope, width, 4, 4),), width - rope, dtype),
    ]
