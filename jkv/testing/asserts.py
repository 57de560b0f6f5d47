"""What a pool must be at any time, and beside its model."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jkv.testing.models import PoolModel, layer_words


def assert_pool_equals(pool: Any, model: PoolModel) -> None:
    """Compares every row of every buffer of a pool with the model, bit for bit.

    Rows that one write addressed twice are left out until `model.settle(pool)`.

    Raises:
      AssertionError: names the buffer, the layer, the ids whose rows differ, and the first differing word.
    """
    for name, expected in model.buffers.items():
        for layer in range(model.layer_num):
            got, want = layer_words(pool, name, layer), expected[layer]
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
