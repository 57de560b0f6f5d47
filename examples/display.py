"""What can be seen of a run of `examples.serve`: a line that is redrawn while it lasts, and a picture afterwards."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from examples.mesh import UsageError
from examples.sharing import Usage

WIDTH = 24  # of the bar
SECONDS = {True: 0.1, False: 5.0}  # between two lines: redrawn on a terminal, or one under another


class Progress:
    """Draws on `out`, or nowhere where it is None. The bar: `#` slots of running requests, `+` cached, `.` free."""

    def __init__(self, requests: int, out: TextIO | None):
        self.requests, self.out = requests, out
        self._ended = 0
        self._last = 0.0

    def shared(self, usage: Usage) -> None:
        """A step of the shared run."""
        capacity = usage.free + usage.cached + usage.used
        used, cached = round(WIDTH * usage.used / capacity), round(WIDTH * (usage.used + usage.cached) / capacity)
        bar = "#" * used + "+" * (cached - used) + "." * (WIDTH - cached)
        done = self.requests - usage.running - usage.waiting
        self._draw(
            f"[{bar}] {done}/{self.requests} done, {usage.running} running, {usage.retractions} put off so far, "
            f"{usage.new_tokens / max(usage.seconds, 1e-9):.1f} tokens/s, pool: {100 * usage.used / capacity:.0f}% in "
            f"use, {100 * usage.cached / capacity:.0f}% cached",
            last=done == self.requests,
        )

    def alone(self, index: int, ended: bool, prompts: int) -> None:
        """A token of prompt `index` of the proof."""
        self._draw(f"alone: {index + ended}/{prompts} prompts", last=ended and index + 1 == prompts)

    def _draw(self, line: str, *, last: bool) -> None:
        if self.out is None or not (last or time.monotonic() - self._last > SECONDS[self.out.isatty()]):
            return
        self._last = time.monotonic()
        redrawn = self.out.isatty()
        print(
            f"\r{line}\033[K" if redrawn else line, end="\n" if last or not redrawn else "", file=self.out, flush=True
        )


def pyplot() -> Any:
    """matplotlib's module for drawing into files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(f"--plot needs the extra `demo`: pip install 'jkv-pool[demo]' ({error})") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def plot(usage: Sequence[Usage], path: Path) -> None:
    """Draws the pool over time, in tokens: in use, cached and free, one on the other, and where requests were put off.

    Raises:
        UsageError: matplotlib is not installed.
    """
    module = pyplot()
    figure, axes = module.subplots(figsize=(9, 4.5), layout="constrained")
    seconds = [u.seconds for u in usage]
    parts = {"in use": ([u.used for u in usage], "#3b6fb6"), "cached": ([u.cached for u in usage], "#e0a030")}
    parts["free"] = ([u.free for u in usage], "#e8e8e8")
    axes.stackplot(
        seconds,
        *(values for values, _ in parts.values()),
        labels=list(parts),
        colors=[color for _, color in parts.values()],
        step="post",
    )
    capacity = usage[0].free + usage[0].cached + usage[0].used
    before = [0, *(u.retractions for u in usage)]
    put_off = [u.seconds for u, earlier in zip(usage, before, strict=False) if u.retractions > earlier]
    axes.plot(put_off, [capacity] * len(put_off), "v", color="#b03030", label="a request is put off", clip_on=False)
    axes.set(xlabel="seconds", ylabel="tokens", xlim=(0, seconds[-1]), ylim=(0, capacity), title="What the pool holds")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    module.close(figure)
