"""What the README's recipes say: fork, retract and resume, speculate, each on rows that tell where they came from."""

import numpy as np
import pytest
from small_pools import mha, rows, same, write

import jkv

PAGE, LENGTH = 4, 12


def read(pool, slots) -> np.ndarray:
    return np.asarray(pool.get_kv(0, slots)[0])


@pytest.fixture
def host():
    allocator = jkv.PagedTokenToKVPoolAllocator(24, PAGE)
    return allocator, jkv.RadixCache(allocator), jkv.ReqToTokenPool(4, LENGTH)


def test_a_fork_shares_whole_pages_and_copies_the_rest(host):
    allocator, cache, table = host
    slots, n, tokens = allocator.alloc_extend([0], [10], [-1]), 10, np.arange(10)
    pool = write(mha(24), slots)
    m = n // PAGE * PAGE
    cache.insert(tokens, slots)
    locks = [cache.match_prefix(tokens) for _ in range(2)]
    for match in locks:
        np.testing.assert_array_equal(match.slots, slots[:m])
        cache.inc_lock_ref(match.node)
    own = allocator.alloc_extend([m], [n], [-1])
    pool = pool.move_kv_cache(own, slots[m:])
    row = int(table.alloc(1)[0])
    table.write(row, 0, np.concatenate([slots[:m], own]))
    fork = table.read(row, 0, n)
    np.testing.assert_array_equal(read(pool, fork), rows(10, 2, 4))
    pool = write(pool, fork[m:], start=50)
    np.testing.assert_array_equal(read(pool, slots), rows(10, 2, 4))
    for mine, match in zip((slots[m:], own), locks, strict=True):
        allocator.free(mine)
        cache.dec_lock_ref(match.node)
    cache.reset()
    assert allocator.available_size() == 24


def test_a_request_that_was_put_off_comes_back_behind_what_is_cached(host):
    allocator, cache, table = host
    slots, n, tokens = allocator.alloc_extend([0], [10], [-1]), 10, np.arange(10)
    pool = write(mha(24), slots)
    cache.insert(tokens[:5], slots[:5])
    match = cache.match_prefix(tokens[:5])
    cache.inc_lock_ref(match.node)
    row, shared = int(table.alloc(1)[0]), match.slots.size
    table.write(row, 0, slots)

    host_copy = pool.get_cpu_copy(jkv.pad_slots(table.read(row, 0, n), LENGTH))
    allocator.free(slots[shared:])
    cache.dec_lock_ref(match.node)
    table.free(row)
    assert allocator.available_size() == 24 - PAGE
    pool = write(pool, allocator.alloc(8), start=50)

    match = cache.match_prefix(tokens[:-1])
    cache.inc_lock_ref(match.node)
    m = match.slots.size
    assert m == PAGE
    new = allocator.alloc_extend([m], [n], [-1])
    restore = jkv.checked_jit(lambda pool, host, loc: pool.load_cpu_copy(host, loc))
    pool = restore(pool, host_copy, jkv.pad_slots(np.concatenate([np.zeros(m, np.int32), new]), LENGTH))
    jkv.wait_for_checks()
    np.testing.assert_array_equal(read(pool, np.concatenate([match.slots, new])), rows(10, 2, 4))


@pytest.mark.parametrize("kept", [6, 7, 8, 9, 12])
def test_rejected_drafts_give_their_pages_back_and_their_slots_again(host, kept):
    allocator, _, _ = host
    both = allocator.alloc_extend([0, 0], [6, 1], [-1, -1])
    slots, other = both[:6], both[6:]
    pool = write(mha(24), slots)
    slots = np.concatenate([slots, allocator.alloc_extend([6], [12], [slots[-1]])])
    pool = write(pool, slots[6:], start=50)
    allocator.free(slots[-(-kept // PAGE) * PAGE :])
    assert allocator.available_size() == 24 - PAGE - -(-kept // PAGE) * PAGE
    again = allocator.alloc_extend([kept], [kept + 2], [slots[kept - 1]])
    within = min(2, -kept % PAGE)
    np.testing.assert_array_equal(again[:within], slots[kept : kept + within])
    assert not np.isin(again, [*slots[:kept], *other]).any()
    pool = write(pool, again, start=90)
    want = np.concatenate([rows(6, 2, 4), rows(kept - 6, 2, 4, start=50), rows(2, 2, 4, start=90)])
    np.testing.assert_array_equal(read(pool, np.concatenate([slots[:kept], again])), want)


def test_restores_that_are_padded_to_one_length_are_traced_once():
    pool, traces = write(mha(24), np.arange(4, 14)), []

    def load(pool, host, loc):
        traces.append(loc.shape)
        return pool.load_cpu_copy(host, loc)

    with jkv.enable_checks(False):
        restore = jkv.checked_jit(load)
        for n in (3, 7, 10):
            host_copy = pool.get_cpu_copy(jkv.pad_slots(np.arange(4, 4 + n), LENGTH))
            back = restore(mha(24), host_copy, jkv.pad_slots(np.arange(4, 4 + n), LENGTH))
            assert same(back, write(mha(24), np.arange(4, 4 + n)))
    assert traces == [(LENGTH,)]


def test_an_id_of_the_padding_page_other_than_0_is_written():
    pool = write(mha(24), np.array([1]))
    np.testing.assert_array_equal(read(pool, [1]), rows(1, 2, 4))
