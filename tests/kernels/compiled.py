"""Runs `aot` and its kin for the tests, and keeps what came out for the next run.

It is kept in the temporary directory, under a hash of the sources and of JAX's version, so that only what changed is
compiled again.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
from aot import ROOT, Call, environment

# What decides on a compilation, beside the library: the program and what it imports.
_PROGRAMS = {
    "aot.py": ("aot.py", "specs.py"),
    "aot_quant.py": ("aot.py", "aot_quant.py", "specs.py", "quant_specs.py", "quant_calls.py"),
    "aot_mosaic.py": ("aot.py", "aot_mosaic.py", "specs.py"),
    "aot_mosaic_quant.py": (
        *("aot.py", "aot_mosaic.py", "aot_mosaic_quant.py", "aot_quant.py"),
        *("specs.py", "quant_specs.py", "quant_calls.py"),
    ),
}


@functools.cache
def plugin() -> str | None:
    """Why nothing can be compiled for CUDA here, or None."""
    version = importlib.metadata.version("jax")
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name}=={version} is not installed (pip install --no-deps: no driver or CUDA library is needed)"
        if found != version:
            return f"{name} is {found}, JAX {version}"
    return None


@functools.cache
def _sources(program: str) -> str:
    """A hash of all that a compilation depends on."""
    digest = hashlib.sha256(importlib.metadata.version("jaxlib").encode())
    here = [pathlib.Path(__file__).with_name(name) for name in _PROGRAMS[program]]
    for path in sorted([*ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("jkv/**/*.py"), *here]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_calls(program: str, chip: str, calls: Sequence[Call], seconds: int) -> dict[Call, dict[str, Any]]:
    """The facts of each call, from one process for all that are not kept. Raises RuntimeError where it fails."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"jkv-aot-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    plain = {c: dataclasses.asdict(c) for c in calls}
    kept = {
        c: folder / hashlib.sha256(f"{_sources(program)} {program} {chip} {json.dumps(p)}".encode()).hexdigest()
        for c, p in plain.items()
    }
    missing = [c for c, path in kept.items() if not path.exists()]
    if missing:
        done = subprocess.run(
            [sys.executable, str(pathlib.Path(__file__).with_name(program)), chip],
            input=json.dumps([plain[c] for c in missing]),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise RuntimeError(f"compiling for {chip}: exit {done.returncode}\n{done.stderr[-4000:]}")
        for c, result in zip(missing, json.loads(done.stdout), strict=True):
            kept[c].write_text(json.dumps(result))
    return {c: json.loads(path.read_text()) for c, path in kept.items()}


class Facts:
    """What comes out of a program's calls, by chip. From the first question on all are compiled, `chips` at a time."""

    def __init__(self, program: str, calls: dict[str, list[Call]], seconds: int, chips: int = 2) -> None:
        self._program, self._calls, self._seconds, self._chips = program, calls, seconds, chips

    @functools.cached_property
    def _compiling(self) -> dict[str, concurrent.futures.Future]:
        pool = concurrent.futures.ThreadPoolExecutor(self._chips)
        return {
            chip: pool.submit(compile_calls, self._program, chip, calls, self._seconds)
            for chip, calls in self._calls.items()
        }

    def __call__(self, chip: str, call: Call) -> dict[str, Any]:
        """The facts of a call; skips the test where nothing can be compiled here."""
        if reason := plugin():
            pytest.skip(reason)
        found = dict(self._compiling[chip].result()[call])
        assert "error" not in found, found["error"]
        return found
