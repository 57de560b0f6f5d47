"""Which requests the pool can take, and what their next step will take of it: asked before anything is allocated.

A request is bound by the aggregate pool of all DCP ranks, `slots.capacity`, in which the factor `dcp_size` stands once;
one rank's `size` never enters alone. What is taken is counted in the allocator's pages, `slots.alloc_page_size` ids
each: three requests of one token take three pages.
"""

import numpy as np
import numpy.typing as npt

from jkv.host_ids import int_array, integer, named
from jkv.page_plan import new_pages
from jkv.slots import SlotSpace


class Admission:
    """Bounds on a request's length, and the pages that a batch will need.

    A scheduler asks before each step, and makes room while it still can::

        while missing := admission.shortfall(admission.decode_pages_needed(lens), allocator.available_size()):
            if not cache.evict(missing):
                retract a request, and take its length out of lens
        slots = allocator.alloc_decode(lens, last_loc)  # cannot fail

    Args:
      slots: the slot space of the pool.
      context_len: tokens that a request can have, its prompt and its output together (and the draft tokens beyond them,
        where decoding is speculative: they take slots too).

    Attributes:
      limit: tokens of a request, `min(context_len, slots.capacity)`.

    Raises:
      ValueError: `slots` is not a SlotSpace, or `context_len` not a positive integer.
    """

    def __init__(self, slots: SlotSpace, context_len: int):
        if not isinstance(slots, SlotSpace):
            raise ValueError(f"Admission: slots must be a SlotSpace, got {type(slots).__name__}")
        self.slots = slots
        self.context_len = integer(context_len, "Admission", "context_len", low=1)
        self.limit = min(self.context_len, slots.capacity)

    def __repr__(self) -> str:
        return f"Admission({self.slots}, context_len={self.context_len})"

    @property
    def max_request_len(self) -> int:
        """Tokens of the longest prompt: `limit - 1`, as one token is always to be generated."""
        return self.limit - 1

    def max_new_tokens(self, prompt_len: int) -> int:
        """Tokens, at least one, that a request can generate after a prompt of `prompt_len`: `limit - prompt_len`.

        Raises:
          ValueError: a prompt longer than `max_request_len`, or a length that is no integer >= 0.
        """
        return self.limit - self._prompt_len(prompt_len, "max_new_tokens")

    def can_admit(self, prompt_len: int, available: int, cached_len: int = 0) -> bool:
        """Whether a request's prompt and its first new token fit now.

        Args:
          prompt_len: tokens of the prompt.
          available: ids that can be had, `allocator.available_size()`. A prefix cache's `evictable_size` may be added
            if those are evicted before allocating; lock the request's own prefix first, which takes it out of them.
          cached_len: leading tokens of the prompt that have slots already: whole pages of a prefix cache.

        Returns:
          False where the request has to wait for others to finish.

        Raises:
          ValueError: a prompt longer than `max_request_len`, which would wait forever; a `cached_len` that passes the
            prompt or does not end with a page; a value that is no integer >= 0.
        """
        where, page = "can_admit", self.slots.alloc_page_size
        prompt_len = self._prompt_len(prompt_len, where)
        cached_len = integer(cached_len, where, "cached_len", low=0)
        if cached_len > prompt_len or cached_len % page:
            raise ValueError(
                f"{where}: cached_len must be whole pages of {page} = page_size {self.slots.page_size} * dcp_size "
                f"{self.slots.dcp_size} within prompt_len {prompt_len}, got {cached_len}"
            )
        return not self.shortfall(self.extend_pages_needed([cached_len], [prompt_len + 1]), available)

    def extend_pages_needed(self, prefix_lens: npt.ArrayLike, seq_lens: npt.ArrayLike) -> int:
        """Pages that `alloc_extend` will take for these requests.

        Args:
          prefix_lens: int `[n]`, tokens that each request has slots for.
          seq_lens: int `[n]`, tokens that it is to have slots for, >= `prefix_lens`.

        Raises:
          TypeError: an argument that does not hold signed integers.
          ValueError: a wrong shape or length, lengths out of order, or a request of more than `limit` tokens.
        """
        where = "extend_pages_needed"
        prefix = int_array(prefix_lens, where, "prefix_lens")
        seq = int_array(seq_lens, where, "seq_lens", length=prefix.size)
        bad = np.flatnonzero((prefix < 0) | (seq < prefix) | (seq > self.limit))
        if bad.size:
            raise ValueError(
                f"{where}: requests {named(bad)}: expected 0 <= prefix_lens <= seq_lens <= {self._limit()}, "
                f"got prefix_lens {named(prefix[bad])} and seq_lens {named(seq[bad])}"
            )
        return self._pages(prefix, seq)

    def decode_pages_needed(self, seq_lens: npt.ArrayLike) -> int:
        """Pages that `alloc_decode` will take for these requests.

        Args:
          seq_lens: int `[n]`, tokens of each request, the new one included (as `alloc_decode` takes them).

        Raises:
          TypeError: `seq_lens` does not hold signed integers.
          ValueError: a wrong shape, or a request of no token or of more than `limit`.
        """
        where = "decode_pages_needed"
        seq = int_array(seq_lens, where, "seq_lens")
        bad = np.flatnonzero((seq < 1) | (seq > self.limit))
        if bad.size:
            raise ValueError(
                f"{where}: seq_lens of requests {named(bad)} must count the new token and lie in [1, {self._limit()}], "
                f"got {named(seq[bad])}"
            )
        return self._pages(seq - 1, seq)

    def shortfall(self, pages: int, available: int) -> int:
        """Ids that have to be freed before `pages` pages can be allocated; 0 where they can be now.

        Args:
          pages: pages needed.
          available: ids that can be had, `allocator.available_size()`; a part of a page among them counts for nothing.

        Raises:
          ValueError: a value that is no integer >= 0.
        """
        page = self.slots.alloc_page_size
        pages = integer(pages, "shortfall", "pages", low=0)
        available = integer(available, "shortfall", "available", low=0)
        return max(0, pages - available // page) * page

    def _pages(self, prefix: npt.NDArray[np.int64], seq: npt.NDArray[np.int64]) -> int:
        return int(new_pages(prefix, seq, self.slots.alloc_page_size).sum())

    def _prompt_len(self, value: int, where: str) -> int:
        prompt_len = integer(value, where, "prompt_len", low=0)
        if prompt_len > self.max_request_len:
            raise ValueError(
                f"{where}: prompt_len {prompt_len} passes max_request_len {self.max_request_len} = {self._limit()} - 1"
            )
        return prompt_len

    def _limit(self) -> str:
        space = self.slots
        return f"{self.limit} = min(context_len {self.context_len}, size {space.size} * dcp_size {space.dcp_size})"
