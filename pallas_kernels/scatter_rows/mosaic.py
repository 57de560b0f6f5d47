"""scatter_rows in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on."""

import dataclasses
import math

import jax
from jax import lax

from pallas_kernels import codecs, mosaic
from pallas_kernels.mosaic import Source

_CAST = {"float32", "bfloat16", "float16"}  # to each other, as `astype` does


def scatter_rows(cache, loc, rows, **options):
    source = _source(cache, rows)
    if not source.cast:
        source = dataclasses.replace(source, rows=mosaic.to_words(rows.astype(cache.dtype)))
    (words,) = mosaic.scatter("scatter_rows", (mosaic.to_words(cache),), [source], loc, **options)
    return lax.bitcast_convert_type(words, cache.dtype)


def unsupported(cache, loc, rows, *, config=None, **options):
    return mosaic.refusal_of_words(cache) or mosaic.refusal(
        [_source(cache, rows).columns()], config, cache, loc, rows, options
    )


def _source(cache, rows):
    word, width = codecs.word_dtype(cache.dtype), math.prod(rows.shape[1:])
    if {cache.dtype.name, rows.dtype.name} <= _CAST and cache.dtype != rows.dtype:
        return Source(rows, 0, 0, width, cache.dtype)
    return Source(jax.ShapeDtypeStruct(rows.shape, word), 0, 0, width, word)
