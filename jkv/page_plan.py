"""The slots that a batch grows into: how requests fill up their last pages and which new pages they take.

Pure functions. Page and slot numbers are those of one space: under DCP that of the logical ids, with widened pages.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jkv.host_ids import INT32_MAX, int_array, integer, named, signed_array

Slots = npt.NDArray[np.int32]
_Wide = npt.NDArray[np.int64]


class Plan(NamedTuple):
    """What an extension takes, an entry a request: int64 `[n]` each."""

    last_page: _Wide  # page that is filled up first; 0 where the prefix ends with its page
    start: _Wide  # first slot taken there
    partial: _Wide  # slots taken there, 0 ... page - 1
    pages: _Wide  # new pages
    tail: _Wide  # slots taken of the last new page


def new_pages(prefix: _Wide, seq: _Wide, page: int) -> _Wide:
    """Pages that requests take as they grow from `prefix` to `seq` tokens, beyond the ones that they have: `[n]`."""
    return -(-seq // page) + (-prefix // page)  # rounds up without a sum that could overflow


def _end_of_int32(page: int) -> int:
    """The end of the last whole page whose slots fit int32."""
    return (INT32_MAX + 1) // page * page


def _plan(where: str, prefix: _Wide, seq: _Wide, last: _Wide, page: int, bound: int) -> Plan:
    """Splits each request's new positions `[prefix, seq)` into the rest of its last page and new pages."""
    filled = prefix % page
    open_page = filled > 0
    bad = np.flatnonzero(open_page & ((last < page) | (last >= bound) | ((last + 1) % page != filled)))
    if bad.size:
        raise ValueError(
            f"{where}: last_loc of requests {named(bad)}: expected (last_loc + 1) % {page} == prefix length % {page}, "
            f"in [{page}, {bound}), got last_loc {named(last[bad])} for prefix lengths {named(prefix[bad])}"
        )
    partial = np.minimum(seq - prefix, -prefix % page)
    last_page = np.where(open_page, last // page, 0)
    shared = np.sort(last_page[partial > 0])
    shared = shared[1:][shared[1:] == shared[:-1]]
    if shared.size:
        requests = np.flatnonzero((partial > 0) & np.isin(last_page, shared))
        raise ValueError(
            f"{where}: last_loc of requests {named(requests)} lie on one page: they would be given the same slots"
        )
    return Plan(last_page, last + 1, partial, new_pages(prefix, seq, page), (seq - 1) % page + 1)


def pages_needed(plan: Plan, available: int) -> int | None:
    """New pages that `plan` needs, or None where that is more than `available`."""
    if plan.pages.max(initial=0) > available:  # first: now the sum cannot overflow
        return None
    needed = int(plan.pages.sum())
    return needed if needed <= available else None


def slots_of(plan: Plan, pages: npt.NDArray[np.integer], page: int) -> Slots:
    """The slots of `plan`, in request order, with `pages` as its new pages."""
    n, used = plan.pages.size, pages.size
    # One run of consecutive slots for the rest of each request's last page, then one for each of its new pages.
    rest = np.arange(n) + np.cumsum(plan.pages) - plan.pages
    is_page = np.ones(n + used, bool)
    is_page[rest] = False
    start, length = np.empty(n + used, np.int64), np.full(n + used, page, np.int64)
    start[rest], length[rest] = plan.start, plan.partial
    start[is_page] = pages.astype(np.int64) * page
    grows = plan.pages > 0
    length[(rest + plan.pages)[grows]] = plan.tail[grows]
    # Slot = run's start + place in the run. int32 wraps on the way for a long result, and wraps back.
    offset = (start - (np.cumsum(length) - length)).astype(np.int32)
    slots = np.repeat(offset, length)
    slots += np.arange(slots.size, dtype=np.int32)
    return slots


def plan_extend(
    where: str, prefix_lens: npt.ArrayLike, seq_lens: npt.ArrayLike, last_loc: npt.ArrayLike, page: int, bound: int
) -> Plan:
    """The plan of `extend_slots` among slots below `bound`, its arguments checked."""
    prefix = int_array(prefix_lens, where, "prefix_lens")
    seq = int_array(seq_lens, where, "seq_lens", length=prefix.size)
    last = int_array(last_loc, where, "last_loc", length=prefix.size)
    bad = np.flatnonzero((prefix < 0) | (seq < prefix))
    if bad.size:
        raise ValueError(
            f"{where}: requests {named(bad)}: expected 0 <= prefix_lens <= seq_lens, "
            f"got prefix_lens {named(prefix[bad])} and seq_lens {named(seq[bad])}"
        )
    return _plan(where, prefix, seq, last, page, bound)


def plan_decode(where: str, seq_lens: npt.ArrayLike, last_loc: npt.ArrayLike, page: int, bound: int) -> Plan:
    """The plan of `decode_slots` below `bound`, its arguments checked: an extension by the last of `seq_lens`."""
    seq = int_array(seq_lens, where, "seq_lens")
    last = int_array(last_loc, where, "last_loc", length=seq.size)
    bad = np.flatnonzero(seq < 1)
    if bad.size:
        raise ValueError(
            f"{where}: seq_lens of requests {named(bad)} must count the new token (at least 1), got {named(seq[bad])}"
        )
    return _plan(where, seq - 1, seq, last, page, bound)


def _from_pages(where: str, plan: Plan, free_pages: npt.ArrayLike, page: int) -> tuple[Slots | None, int]:
    pages = signed_array(free_pages, where, "free_pages")
    needed = pages_needed(plan, pages.size)
    if needed is None:
        return None, 0
    pages = pages[:needed]  # the rest is never looked at: its length may be the pool's
    end = _end_of_int32(page) // page
    bad = pages[(pages < 1) | (pages > end - 1)]
    if bad.size:
        raise ValueError(f"{where}: free_pages must lie in [1, {end}), got {named(bad)}")
    return slots_of(plan, pages, page), needed


def extend_slots(
    prefix_lens: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    last_loc: npt.ArrayLike,
    free_pages: npt.ArrayLike,
    page_size: int,
) -> tuple[Slots | None, int]:
    """Slots for the tokens that each request grows by, and the number of pages taken from the front of `free_pages`.

    A request first fills up the page of its last token, then takes whole new pages, in request order (the arithmetic of
    SGLang's `alloc_extend`).

    Args:
      prefix_lens: int `[n]`, tokens that each request has slots for.
      seq_lens: int `[n]`, tokens that it is to have slots for, >= `prefix_lens`.
      last_loc: int `[n]`, slot of its token `prefix_len - 1`. Not read where the prefix ends with its page.
      free_pages: int `[m]`, page numbers >= 1.
      page_size: slots of a page in the space of these ids (under DCP `page_size * dcp_size`).

    Returns:
      int32 slots, `[sum(seq_lens - prefix_lens)]`, in request order, and the pages used. `(None, 0)` where `free_pages`
      are too few, which is decided before any of them is read.

    Raises:
      TypeError: an argument that does not hold signed integers.
      ValueError: a wrong shape or length; lengths out of order; `(last_loc + 1) % page_size != prefix_len % page_size`;
        two requests that fill up the same page; a page number that int32 slots cannot reach.
    """
    where = "extend_slots"
    page = integer(page_size, where, "page_size", low=1, high=INT32_MAX)
    plan = plan_extend(where, prefix_lens, seq_lens, last_loc, page, _end_of_int32(page))
    return _from_pages(where, plan, free_pages, page)


def decode_slots(
    seq_lens: npt.ArrayLike, last_loc: npt.ArrayLike, free_pages: npt.ArrayLike, page_size: int
) -> tuple[Slots | None, int]:
    """One slot for each request's new token, and the number of pages taken from the front of `free_pages`.

    Args:
      seq_lens: int `[n]`, tokens of each request, the new one included.
      last_loc: int `[n]`, slot of its token `seq_len - 2`. Not read where the new token starts a page.
      free_pages: int `[m]`, page numbers >= 1.
      page_size: slots of a page, as in `extend_slots`.

    Returns:
      int32 slots `[n]` and the pages used; `(None, 0)` on shortage, as `extend_slots`.

    Raises:
      TypeError, ValueError: as `extend_slots`.
    """
    where = "decode_slots"
    page = integer(page_size, where, "page_size", low=1, high=INT32_MAX)
    plan = plan_decode(where, seq_lens, last_loc, page, _end_of_int32(page))
    return _from_pages(where, plan, free_pages, page)
