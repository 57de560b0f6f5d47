"""The kernels on a GPU, in under four minutes: whether they are right, and how long they take.

Right: every op in every implementation against `xla` on the same device, every row of the buffers, with ids of all
kinds, alone and as one of four ranks.

How long: many calls in one jit, so that gaps between launches don't count: a step calls the op once for each layer of a
stacked, donated pool that is larger than the L2 cache, to random slots, other ones in each step. GB/s counts the bytes
of the rows, read once and written once, and of the ids. Beside them: the rate of a device-to-device copy (of which
"% of copy" is), XLA's scatter in the better of its forms (the library's, on words of the format, and `xla uint32`, on
32-bit words; both with unique indices), and a row scatter in plain Triton as PyTorch programs have it, one program a
row, in a CUDA graph (where torch and triton are installed).

What fails is said in its row, the rest goes on, and the exit status is 1.

On a machine without a GPU `--interpret` runs all of it in tiny sizes on the CPU, the kernels in Pallas' interpreter.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import report
from benchmarks.gpu_cases import BUILDERS, CASES, WIDE, Case, Size, Work
from pallas_kernels import dispatch

COLUMNS = ("case", "N", "implementation", "us", "GB/s", "% of copy", "times XLA", "times plain Triton", "result")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large and how long.

    Attributes:
      check: rows of a call, layers, rows of a layer, where the result is compared.
      few, many: the same for up to a thousand rows, and beyond; a call's rows are given apart.
      copy: bytes that are copied to measure the rate. seconds: of a measurement. rounds: measurements of one thing.
    """

    check: Size
    few: Size
    many: Size
    copy: int
    seconds: float
    rounds: int

    def of(self, n: int) -> Size:
        """Of a timed call with `n` rows."""
        return dataclasses.replace(self.few if n <= 1024 else self.many, n=n)


# Pools of 1 to 4 GB, buffers of at least as many bytes as the largest L2 cache.
GPU = Scale(Size(1000, 2, 4096), Size(0, 32, 16384), Size(0, 8, 131072), 1 << 30, 0.02, 5)
TINY = Scale(Size(20, 1, 16), Size(0, 2, 32), Size(0, 2, 32), 1 << 16, 0.0, 1)


def used(implementation: str, interpret: bool) -> Any:
    """A context in which ops run that way."""
    name = "xla" if implementation == WIDE else implementation
    return dispatch.use(name, interpret=interpret and name != "xla")


def first_line(error: BaseException) -> str:
    """What an exception says, for a table's cell."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def odd_ids(n: int, bound: int, rng: np.random.Generator) -> np.ndarray:
    """Ids of all kinds in random order: negative, out of range, padding, the last; the good ones distinct."""
    bad = [0, -1, -2, -bound, bound, bound + 1, 2**31 - 1, -(2**31)][: n // 2]
    good = [bound - 1, *(1 + rng.permutation(bound - 2))][: n - len(bad)]
    return rng.permutation(np.array([*bad, *good], np.int32))


def differing(got: Any, want: Any, cast_to: str | None) -> int:
    """Words that are not alike; NaNs of the format are."""
    total = 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        unlike = a != b
        if cast_to is not None:
            nan = [jnp.isnan(lax.bitcast_convert_type(x, jnp.dtype(cast_to)).astype(jnp.float32)) for x in (a, b)]
            unlike &= ~(nan[0] & nan[1])
        total += int(unlike.sum())
    return total


@functools.lru_cache(maxsize=2)  # XLA's of a case, for the kernels that it is compared with
def results(case: Case, implementation: str, scale: Scale, interpret: bool, ranks: int, interleave: int) -> list[Any]:
    """The state after a call on each layer with ids of all kinds, on the first and the last of so many ranks."""
    work = case.build(scale.check)
    layers = [jnp.int32(i) for i in range(len(work.values))]
    loc = odd_ids(scale.check.n, scale.check.rows * ranks, np.random.default_rng(ranks))

    def step(state: Any, loc: Any, values: Any, layers: Any, rank: Any) -> Any:
        slots = {"dcp_size": ranks, "dcp_rank": rank, "interleave": interleave}
        for i, (value, layer) in enumerate(zip(values, layers, strict=True)):
            state = work.call(state, loc, value, i, layer, **slots)
        return state

    with used(implementation, interpret):
        run = jax.jit(step)
        return [run(work.make(), loc, work.values, layers, jnp.int32(rank)) for rank in range(ranks)[::3]]


def check(case: Case, implementation: str, scale: Scale, interpret: bool) -> dict[str, Any]:
    """Runs the case on all its layers, alone and as ranks of four. Raises AssertionError where it differs from XLA."""
    work, compared = case.build(scale.check), 0
    for ranks, interleave in ((1, 1), (4, 2)) if work.ranks else ((1, 1),):
        want = results(case, "xla", scale, interpret, ranks, interleave)
        got = results.__wrapped__(case, implementation, scale, interpret, ranks, interleave)
        if wrong := differing(got, want, work.cast_to):
            raise AssertionError(f"{wrong} words differ from XLA's, {ranks} ranks")
        compared += sum(x.size for x in jax.tree.leaves(want))
    return {"result": f"equal ({compared:,} words)"}


def steps_of(work: Work) -> Callable[..., Any]:
    """A function of the state, the ids `[steps, n]` of all steps, and each call's values and layer: the new state."""

    def run(state: Any, locs: Any, values: Any, layers: Any) -> Any:
        def step(state: Any, loc: Any) -> tuple[Any, None]:
            for i, (value, layer) in enumerate(zip(values, layers, strict=True)):
                state = work.call(state, loc, value, i, layer)
            return state, None

        return lax.scan(step, state, locs)[0]

    return run


class Lap:
    """The implementations of a case, timed one after the other on the same buffers."""

    def __init__(self, case: Case, n: int, scale: Scale, interpret: bool, copy: float) -> None:
        self.case, self.n, self.scale, self.interpret, self.copy = case, n, scale, interpret, copy
        self._kept: tuple[Work, Any] | None = None  # XLA's other form has buffers of its own, and comes last

    def time(self, implementation: str) -> dict[str, Any]:
        """The cells of its row."""
        size, (work, state) = self.scale.of(self.n), self._kept or (None, None)
        if work is None or implementation == WIDE:
            self._kept = state = None  # before there is another one
            work = self.case.build(size, implementation)
        calls = len(work.values)
        steps = int(min(max(self.scale.seconds / (max(2e-6, work.nbytes / 2e12) * calls), 2), 200))
        rng = np.random.default_rng(self.n)
        ids = np.stack([1 + rng.permutation(size.rows - 1)[: self.n] for _ in range(steps)])
        arguments = jnp.asarray(ids, jnp.int32), list(work.values), [jnp.int32(i) for i in range(calls)]
        state, self._kept = work.make() if state is None else state, None  # an error may lose it
        with used(implementation, self.interpret):
            compiled = jax.jit(steps_of(work), donate_argnums=0).lower(state, *arguments).compile()
        times = []
        for _ in range(1 + self.scale.rounds):
            start = time.perf_counter()
            state = jax.block_until_ready(compiled(state, *arguments))
            times.append((time.perf_counter() - start) / (steps * calls))
        self._kept = work, state
        seconds = statistics.median(times[1:])
        rate = work.nbytes / seconds
        return {"us": seconds * 1e6, "GB/s": rate / 1e9, "% of copy": 100 * rate / self.copy, "result": "timed"}


def copy_rate(scale: Scale) -> float:
    """Bytes a second that a device-to-device copy reads and writes."""
    data, copy = jnp.zeros(scale.copy, jnp.uint8), jax.jit(lambda x: jnp.copy(x))
    times = []
    for _ in range(1 + scale.rounds):
        start = time.perf_counter()
        for _ in range(8):
            copied = copy(data)
        copied.block_until_ready()
        times.append((time.perf_counter() - start) / 8)
    return 2 * scale.copy / statistics.median(times[1:])


def plain_triton(cases: Sequence[tuple[Case, int]], scale: Scale, interpret: bool) -> dict[str, float | None] | str:
    """Seconds of a call of the plain Triton scatter by "case N" (None: interpreted), or why there are none."""
    asked = [
        {"name": f"{case.name} {n}", "parts": case.spec.parts, "joined": case.op == "scatter_mla"}
        | {"fp8": case.spec.scaled, **dataclasses.asdict(scale.of(n))}
        for case, n in cases
    ]
    command = [sys.executable, "-m", "benchmarks.plain_triton", *(["--interpret"] if interpret else [])]
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return "it took more than 90 seconds"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:160]
    return json.loads(done.stdout)


def measure(options: argparse.Namespace, scale: Scale, kind: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of the table, and what holds for all of them."""
    end = time.monotonic() + options.seconds
    cases = [c for c in CASES if c.op in options.ops]
    sizes = {c: (1, 4)[: len(c.timed)] if options.interpret else c.timed for c in cases}
    writes = [(c, n) for c in cases if c.op in ("scatter_kv", "scatter_mla") for n in sizes[c]]
    plain = plain_triton(writes, scale, options.interpret)
    copy, rows = copy_rate(scale), list[dict[str, Any]]()

    def row(case: Case, n: int, name: str, fn: Callable[[], dict[str, Any]]) -> None:
        known = {"case": case.name, "N": n, "implementation": name}
        reason = dispatch.unavailable(name, kind) if name != WIDE else None
        if reason is not None or time.monotonic() > end:
            rows.append(known | {"result": f"not run: {reason or 'the time is up'}"})
            return
        try:
            rows.append(known | fn())
        except Exception as error:  # whatever it is, it is this row's
            rows.append(known | {"result": f"FAILED {first_line(error)}"})

    for case in cases:
        for name in case.implementations:
            if name in options.implementations and name != "xla":
                row(case, scale.check.n, name, functools.partial(check, case, name, scale, options.interpret))
    for case in cases:
        for n in sizes[case]:
            began = len(rows)
            lap = Lap(case, n, scale, options.interpret, copy)
            for name in case.implementations:
                if name in (*options.implementations, WIDE):
                    row(case, n, name, functools.partial(lap.time, name))
            compare(rows[began:], plain.get(f"{case.name} {n}") if isinstance(plain, dict) else None)
    return rows, {"copy GB/s": copy / 1e9, "plain Triton": plain}


def compare(rows: list[dict[str, Any]], plain: float | None) -> None:
    """Adds to the rows of one case and size how many times faster each is than XLA's better form, and plain Triton."""
    xla = [r["us"] for r in rows if r["implementation"] in ("xla", WIDE) and "us" in r]
    for r in rows:
        if "us" in r and xla:
            r["times XLA"] = min(xla) / r["us"]
        if "us" in r and plain is not None:
            r["times plain Triton"] = plain * 1e6 / r["us"]


def cell(value: Any) -> str:
    """Three digits of a number, else its text."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; `--json` writes it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes on the CPU, kernels interpreted")
    parser.add_argument("--implementations", nargs="+", choices=["triton", "mosaic", "xla"])
    parser.add_argument("--ops", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--seconds", type=float, default=210, help="after which nothing more is begun")
    options = parser.parse_args(argv)
    # Mosaic's interpreter takes minutes where Triton's takes seconds.
    options.implementations = options.implementations or ["triton", "xla", *([] if options.interpret else ["mosaic"])]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # another process measures plain Triton
    kind = None
    if not options.interpret:
        try:
            kind = jax.devices("cuda")[0].device_kind
        except RuntimeError:
            print(
                "gpu_check: JAX finds no CUDA device here; --interpret runs it in tiny sizes on the CPU",
                file=sys.stderr,
            )
            return 2
    start = time.monotonic()
    rows, common = measure(options, TINY if options.interpret else GPU, kind)
    title = f"{kind or 'interpreted on the CPU'}, JAX {jax.__version__}, copy {common['copy GB/s']:,.0f} GB/s"
    print(report.table(title, COLUMNS, [[cell(r.get(key, "")) for key in COLUMNS] for r in rows]))
    if isinstance(common["plain Triton"], str):
        print(f"plain Triton was not measured: {common['plain Triton']}")
    failed = sum(r["result"].startswith("FAILED") for r in rows)
    print(f"{len(rows)} rows, {failed} failed, {time.monotonic() - start:.0f} seconds")
    report.write_json(options.json, [{"device": kind, **common}, *rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
