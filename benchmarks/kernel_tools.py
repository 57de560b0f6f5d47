"""Modules of the kernels' tests that the benchmarks use as well."""

import importlib
import pathlib
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).parent.parent / "tests" / "kernels"


def tool(name: str) -> Any:
    """The module of that name: "specs" (rows of real models), "aot" (compiles for a GPU that is not here)."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
