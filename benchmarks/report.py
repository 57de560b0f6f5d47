"""Timing in interleaved rounds, and one table or JSON file for the outcome."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def one_core() -> None:
    """Keeps this process to one core and to the CPU backend; to be called before JAX is imported.

    With more, XLA hands parts of a step of some microseconds to other threads, and a busy machine wakes them late.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, seconds: float, rounds: int = 5, clock: str = "wall"
) -> dict[str, float]:
    """Median time of one call of each contender, in seconds.

    Args:
      contenders: what to time, by name; each call returns when its work is done.
      seconds: how long to go on, in all; there are at least `rounds` rounds.
      rounds: the least number of rounds. In each, every contender is called for about a millisecond, at least once, in
        an order that rotates: short calls find warm caches, as they would in a loop of their own.
      clock: "wall", or "cpu" for the time that all threads of this process spent computing: on a busy machine.
    """
    now = CLOCKS[clock]
    names = list(contenders)
    calls = {}
    for name in names:
        contenders[name]()  # compiles, and touches every page
        start = time.perf_counter()
        contenders[name]()
        calls[name] = max(1, int(1e-3 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        turn = done % len(names)
        for name in names[turn:] + names[:turn]:
            start = now()
            for _ in range(calls[name]):
                contenders[name]()
            times[name].append((now() - start) / calls[name])
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


def memory(lowered: Any) -> Any:
    """What the compiled program says of its memory: `alias_size_in_bytes`, `temp_size_in_bytes` and others.

    Raises:
      RuntimeError: this backend says nothing.
    """
    analysis = lowered.compile().memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend gives no memory analysis")
    return analysis


def microseconds(seconds: float) -> str:
    """A time for a table cell, in microseconds, with about three digits."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join([title, "", *lines, ""])


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the measurements, and what they ran on, to FILE")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: computing time, on a busy machine")
    return parser


def environment() -> dict[str, Any]:
    """Versions and machine, for the JSON file and the table's title."""
    import jax

    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def write_json(path: str | None, measurements: Sequence[Mapping[str, Any]]) -> None:
    """Writes the measurements with their environment to `path`, if one is given."""
    if path is not None:
        with open(path, "w") as file:
            json.dump({"environment": environment(), "measurements": list(measurements)}, file, indent=1)
