"""What a prefix cache tells a router: which pages it has come to hold, and which it holds no longer.

A router sends a request where most of its prompt is cached. It knows a page by a hash of all tokens up to the page's
end, and so needs no tree: the cached prefix of a prompt is as long as its `page_hashes` are held, one after another.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jkv.host_ids import int_array, integer

Hashes = npt.NDArray[np.uint64]
_HASH_BYTES = 8


class PagesStored(NamedTuple):
    """Consecutive pages of one sequence that the cache has taken over.

    Attributes:
      extra_key: the tree that they are in.
      page_hashes: uint64 `[n]`, see `page_hashes`.
      parent_hash: hash of the page in front of the first, None where that starts the sequence.
      token_ids: int64 `[n * page]`.
    """

    extra_key: Hashable
    page_hashes: Hashes
    parent_hash: int | None
    token_ids: npt.NDArray[np.int64]


class PagesRemoved(NamedTuple):
    """Consecutive pages of one sequence that the cache has given up.

    Attributes:
      extra_key: the tree that they were in.
      page_hashes: uint64 `[n]`, as they were stored; possibly in other groups.
    """

    extra_key: Hashable
    page_hashes: Hashes


def page_hashes(token_ids: npt.ArrayLike, page_size: int, parent_hash: int | None = None) -> Hashes:
    """Hashes of the whole pages of a sequence, each of all tokens up to the page's end; the same in every process.

    Args:
      token_ids: int `[m]`; a partial last page has no hash.
      page_size: tokens of a page of the cache, its `alloc_page_size`.
      parent_hash: hash of the page in front of the first, where `token_ids` do not start the sequence.

    Returns:
      uint64 `[m // page_size]`: 64 bits of BLAKE2b of the previous hash and the page's tokens, little-endian.

    Raises:
      TypeError: `token_ids` are not signed integers. ValueError: not 1-D, or another argument out of range.
    """
    tokens = int_array(token_ids, "page_hashes", "token_ids").astype("<i8", copy=False)
    page = integer(page_size, "page_hashes", "page_size", low=1)
    previous = b""
    if parent_hash is not None:
        high = 2 ** (8 * _HASH_BYTES) - 1
        previous = integer(parent_hash, "page_hashes", "parent_hash", low=0, high=high).to_bytes(_HASH_BYTES, "little")
    digests = []
    for start in range(0, tokens.size - page + 1, page):
        state = hashlib.blake2b(previous, digest_size=_HASH_BYTES)
        state.update(tokens[start : start + page].tobytes())
        previous = state.digest()
        digests.append(previous)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
