"""Plants the faults that KV pools had into the rules of the library, and shows that the property test catches each."""

import collections
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from property_cases import CONTEXTS, LAYOUTS, PAGE, cases, step
from test_property import play_case

from jkv import checks
from jkv.pools import base, programs
from pallas_kernels import codecs, index
from pallas_kernels.codecs import dsa, fp4

local_row, owner, row_of = index.local_row, index.owner, index.row


def without_divide(loc, rows, **options):
    """Filters by owner, but indexes a rank's buffer by the logical id."""
    mine = local_row(loc, rows, **options) >= 0
    return jnp.where(mine & (loc < rows), loc, -1)


def without_filter(loc, rows, *, dcp_size=1, dcp_rank=0, interleave=1, skip_slot=None):
    """Divides, but writes on every rank."""
    del dcp_rank
    ok = (loc >= 0) & (loc < rows * dcp_size) & (loc != skip_slot)
    return jnp.where(ok, row_of(jnp.where(ok, loc, 0), dcp_size, interleave), -1)


def with_bound(bound):
    """Takes ids below `bound(rows, dcp_size)` only."""

    def local(loc, rows, **options):
        rows_of_loc = local_row(loc, rows, **options)
        return jnp.where(loc < bound(rows, options.get("dcp_size", 1)), rows_of_loc, -1)

    return local


def negative_wraps(loc, rows, **options):
    """Counts negative ids from the end, as JAX does."""
    bound = rows * options.get("dcp_size", 1)
    return local_row(jnp.where((loc < -1) & (loc >= -bound), loc + bound, loc), rows, **options)


def clamps(loc, rows, **options):
    """Moves ids past the end onto the last slot."""
    return local_row(jnp.minimum(loc, rows * options.get("dcp_size", 1) - 1), rows, **options)


def writes_padding(loc, rows, *, skip_slot=None, **options):
    """Takes slot 0 for a slot like any other."""
    del skip_slot
    return local_row(loc, rows, **options)


def ignores_interleave(loc, rows, *, interleave=1, **options):
    """Deals ids out one at a time."""
    del interleave
    return local_row(loc, rows, **options)


def dropped_by_minus_one_only(loc, rows, *, skip_slot=None, **options):
    """Guards against -1, the usual padding, and leaves other negative ids to floor division and JAX's wrapping."""
    options = {"dcp_size": 1, "dcp_rank": 0, "interleave": 1} | options
    ok = (loc < rows * options["dcp_size"]) & (loc != -1) & (loc != skip_slot)
    ok &= owner(loc, options["dcp_size"], options["interleave"]) == options["dcp_rank"]
    return jnp.where(ok, row_of(loc, options["dcp_size"], options["interleave"]) % rows, -1)


def without_clamp(rows, dtype, scale=None, divide=codecs.exact_div):
    """Casts to FP8 as XLA does: NaN or infinity past the finite range."""
    if scale is not None:
        rows = divide(rows, scale)
    return jax.lax.bitcast_convert_type(rows.astype(dtype), codecs.word_dtype(dtype))


def without_scale(rows, dtype, scale=None, *divide, to_words=codecs.to_words):
    """Drops the scale at the write."""
    del scale
    return to_words(rows, dtype, None, *divide)


def by_reciprocal(rows, dtype, scale=None, *divide, to_words=codecs.to_words):
    """Multiplies by 1 / scale."""
    if scale is not None:
        rows = rows.astype(jnp.float32) * (1 / jnp.asarray(scale, jnp.float32).reshape(()))
    return to_words(rows, dtype, None, *divide)


def scales_of_every_rank(buffer, row, rows, *, set_rows=index.set_rows, **options):
    """Writes FP4 scales of what is not this rank's to the rank's first rows."""
    if buffer.dtype == jnp.uint8 and buffer.ndim == (2 if options.get("layer") is None else 3):
        row = jnp.where(row < 0, jnp.arange(row.shape[0]), row)
    return set_rows(buffer, row, rows, **options)


def moves_without_scales(buffers, *args, move_rows=programs.move_rows, **options):
    """Leaves the FP4 scales where they are."""
    moved = move_rows(buffers, *args, **options)
    return tuple(b if b.ndim < 3 else m for b, m in zip(buffers, moved, strict=True))


def rounds_the_exponent_down(amax, exponents=fp4.exponents):
    """Takes the floor of the logarithm where it is not a whole number."""
    return jnp.maximum(exponents(amax) - 1, -33)


def probes_one_rank(loc, label, *, bound, probe=checks.probe_ids, **options):
    """Probes against the rows of one rank, as if ids were rows."""
    probe(loc, label, bound=min(bound, 12), **options)


def other_layer(self, layer_id, door, layer=base.Pool._layer):
    """Forgets `start_layer` for stacked pools."""
    arrays, at = layer(self, layer_id, door)
    return arrays, at if at is None else (at + self.layout.start_layer) % self.layout.layer_num


MUTANTS = {
    "no divide": (index, "local_row", without_divide),
    "no owner filter": (index, "local_row", without_filter),
    "the bound of one rank": (index, "local_row", with_bound(lambda rows, _: rows)),
    "one padding page in all": (index, "local_row", with_bound(lambda rows, c: (rows - PAGE) * c + PAGE)),
    "negative ids wrap": (index, "local_row", negative_wraps),
    "negative ids other than -1 wrap": (index, "local_row", dropped_by_minus_one_only),
    "ids past the end clamp": (index, "local_row", clamps),
    "padding is written": (index, "local_row", writes_padding),
    "padding is written by move and load": (programs, "SKIP_SLOT", None),
    "interleave is ignored": (index, "local_row", ignores_interleave),
    "rows are not fetched from other ranks": (index, "sum_rows", lambda rows, axis: rows),
    "FP8 does not saturate": (codecs, "to_words", without_clamp),
    "the scale is dropped": (codecs, "to_words", without_scale),
    "the scale is a reciprocal": (codecs, "to_words", by_reciprocal),
    "FP4 scales are written on every rank": (index, "set_rows", scales_of_every_rank),
    "moves forget the FP4 scales": (programs, "move_rows", moves_without_scales),
    "the FP4 exponent is rounded down": (fp4, "exponents", rounds_the_exponent_down),
    "the scale of a packed tile is not divided": (dsa, "scales", lambda amax: jax.lax.bitcast_convert_type(amax, "f")),
    "no probe of ids": (checks, "probe_ids", lambda *args, **options: None),
    "no probe of rows": (checks, "probe_rows", lambda *args, **options: None),
    "no probe of layers": (checks, "probe_layer", lambda *args, **options: None),
    "probes of one rank": (checks, "probe_ids", probes_one_rank),
    "the wrong layer of a stage": (base.Pool, "_layer", other_layer),
}


def forget_compiled() -> None:
    step.cache_clear()
    jax.clear_caches()


def play_all() -> None:
    for context, layout in itertools.product(CONTEXTS, LAYOUTS):
        for case in cases(context, layout):
            play_case(case, 9, True, collections.Counter(), phases=(hypothesis.Phase.generate,))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_property_test_catches(mutant, monkeypatch):
    owner_of_rule, name, replacement = MUTANTS[mutant]
    forget_compiled()
    monkeypatch.setattr(owner_of_rule, name, replacement)
    try:
        with pytest.raises(AssertionError, match=r"differ|verdict"):
            play_all()
    finally:
        forget_compiled()
