"""Slots that make up whole pages."""

import numpy as np
import numpy.typing as npt

from jkv.host_ids import named


def first_slots(ids: npt.NDArray[np.int64], page: int, where: str, name: str) -> npt.NDArray[np.int64]:
    """The first id of each page of `ids` `[n * page]`, which must be whole, distinct pages, one after another.

    Raises:
      ValueError: ids that are not; they are named.
    """
    runs = ids.reshape(-1, page)
    first = runs[:, 0]
    bad = (first % page != 0) | (runs != first[:, None] + np.arange(page)).any(axis=1)
    if bad.any():
        raise ValueError(
            f"{where}: {name} must be whole pages of {page} consecutive ids from a multiple of {page}, unlike those at "
            f"positions {named(np.flatnonzero(bad) * page)}, which start with ids {named(first[bad])}"
        )
    ordered = np.sort(first)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if twice.size:
        raise ValueError(f"{where}: {name} holds pages twice, starting at ids {named(twice)}")
    return first
