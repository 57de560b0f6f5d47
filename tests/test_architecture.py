"""The rules that keep the code in layers: who imports whom, how long a module is, what is public and documented."""

import ast
import functools
import inspect
import os
import pathlib
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

import jkv
import jkv.testing

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = ("jkv", "pallas_kernels")
RUN_TIME = {"jax", "chex", "numpy", "flatbuffers", *LIBRARY} | sys.stdlib_module_names
SHIM = "jkv._shim"
# Shared by every op of pallas_kernels; an op is any other folder.
KERNEL_COMMON = {"pallas_kernels.index", "pallas_kernels.codecs", "pallas_kernels.dispatch"}
# What the kernels of one backend share, and only they may import.
BACKENDS = {"pallas_kernels.triton", "pallas_kernels.mosaic"}
# What stands above the pools, and what a pool must therefore not know.
ABOVE_POOLS = {
    "jkv",
    "jkv.allocator",
    "jkv.request",
    "jkv.admission",
    "jkv.radix_cache",
    "jkv.testing",
    "jkv.capacity",
    "jkv.plan",
}


@functools.cache
def modules(*packages: str) -> dict[str, ast.Module]:
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    assert all(package in found for package in packages)
    return found


def is_package(module: str) -> bool:
    return (ROOT.joinpath(*module.split(".")) / "__init__.py").exists()


def is_module(module: str) -> bool:
    return is_package(module) or ROOT.joinpath(*module.split(".")).with_suffix(".py").exists()


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Absolute names of the modules that `module` imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package(module)]
                base = ".".join([*parts, base]) if base else ".".join(parts)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if is_module(name) else base


def project_imports(module: str, tree: ast.Module) -> set[str]:
    return {name for name in imports(module, tree) if name.split(".")[0] in LIBRARY}


def within(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def test_kernels_know_nothing_of_the_pools():
    for module, tree in modules("pallas_kernels").items():
        assert not [name for name in project_imports(module, tree) if within(name, "jkv")], module


def test_an_op_imports_only_itself_and_what_all_ops_share():
    folders = {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/__init__.py")}
    ops = folders - {"codecs", "mosaic", "triton"}
    assert ops
    for module, tree in modules("pallas_kernels").items():
        if module == "pallas_kernels":
            continue
        folder = ".".join(module.split(".")[:2])
        allowed = {folder} if within(module, *KERNEL_COMMON) else {folder, *KERNEL_COMMON}
        allowed |= {"pallas_kernels.index"} if module != "pallas_kernels.index" else set()
        allowed |= {name for name in BACKENDS if module.split(".")[-1] == name.split(".")[-1]}
        extra = {name for name in project_imports(module, tree) if not within(name, *allowed)}
        assert not extra, f"{module} imports {extra}"


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("jkv.slots", {"pallas_kernels.index"}), ("jkv.checks", {SHIM}), (SHIM, set()), ("pallas_kernels.index", set())],
)
def test_foundations_import_nothing_else_of_the_project(module: str, allowed: set[str]):
    assert project_imports(module, modules(*LIBRARY)[module]) <= allowed


def test_pools_import_downwards():
    pools = {name: tree for name, tree in modules("jkv").items() if within(name, "jkv.pools")}
    assert {"jkv.pools", "jkv.pools.base", "jkv.pools.mha", "jkv.pools.mla"} <= set(pools)
    families = set(pools) - {"jkv.pools", "jkv.pools.base", "jkv.pools.dtypes", "jkv.pools.programs"}
    for module, tree in pools.items():
        assert not project_imports(module, tree) & ABOVE_POOLS, module
        if module != "jkv.pools":
            # A family may build on what all share, and a quantised one on the plain family whose doors it has.
            others = families - {module, "jkv.pools.mha" if "mha" in module else "jkv.pools.mla"}
            if module in ("jkv.pools.mha", "jkv.pools.mla"):
                others = families - {module}
            assert not [name for name in project_imports(module, tree) if within(name, *others)], module


def test_no_import_cycles():
    graph = {module: project_imports(module, tree) - {module} for module, tree in modules(*LIBRARY).items()}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path, module])}"
        for name in graph.pop(module, ()):
            visit(name, (*path, module))

    while graph:
        visit(next(iter(graph)), ())


def test_private_jax_stays_in_the_shim():
    for module, tree in modules(*LIBRARY, "examples", "benchmarks").items():
        if module == SHIM:
            continue
        names = [name for name in imports(module, tree) if within(name, "jax._src", "jaxlib")]
        names += [
            ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "_src"
        ]
        names += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and str(node.value).startswith("jax._src")
        ]
        assert not names, f"{module} reaches into {names}"


def test_the_library_needs_what_it_declares():
    for module, tree in modules(*LIBRARY).items():
        extra = {name for name in imports(module, tree) if name.split(".")[0] not in RUN_TIME}
        assert not extra, f"{module} imports {extra}"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {need.split(">")[0] for need in declared} == {"jax", "chex", "numpy", "flatbuffers"}


def test_examples_use_the_public_api_only():
    for module, tree in modules("examples").items():
        used = project_imports(module, tree)
        assert not [name for name in used if within(name, "pallas_kernels")], module
        assert used <= {"jkv", "jkv.testing"}, module
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jkv":
                assert hasattr(jkv, node.attr), f"{module} uses jkv.{node.attr}"
                assert not node.attr.startswith("_"), f"{module} uses jkv.{node.attr}"


def test_modules_are_short():
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for package in (*LIBRARY, "examples", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
    }
    long = {path: n for path, n in lengths.items() if n > (600 if path.parts[0] == "pallas_kernels" else 400)}
    assert not long
    library = [n for path, n in lengths.items() if path.parts[0] in LIBRARY and n > 1]
    assert statistics.median(library) < 150


def test_no_assert_and_no_swallowed_import_in_the_library():
    for module, tree in modules(*LIBRARY).items():
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{module}:{node.lineno}: assert"
            if isinstance(node, ast.ExceptHandler) and node.type is not None and "Import" in ast.unparse(node.type):
                assert not all(isinstance(line, ast.Pass) for line in node.body), f"{module}:{node.lineno}: swallowed"


def test_the_package_init_lists_the_public_names_and_does_nothing_else():
    tree = modules("jkv")["jkv"]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, (
                    f"jkv/__init__.py:{node.lineno}: write `{alias.name} as {alias.name}`"
                )
        elif isinstance(node, ast.Assign):
            assert {ast.unparse(target) for target in node.targets} <= {"__version__", "__all__"}
        else:
            assert isinstance(node, ast.Expr), f"jkv/__init__.py:{node.lineno}: {ast.unparse(node)}"
            assert isinstance(node.value, ast.Constant), f"jkv/__init__.py:{node.lineno}: {ast.unparse(node)}"


def test_all_names_what_the_package_init_imports():
    names = [
        alias.name for node in modules("jkv")["jkv"].body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(jkv.__all__) == sorted(names)
    starred: dict[str, object] = {}
    exec("from jkv import *", starred)
    assert starred["PoolOptions"] is jkv.PoolOptions


def test_the_version_is_the_distributions():
    assert jkv.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def public_objects() -> Iterator[tuple[str, object]]:
    for module in (jkv, jkv.testing):
        for name, value in sorted(vars(module).items()):
            home = str(getattr(value, "__module__", ""))
            public = not name.startswith("_") and not inspect.ismodule(value) and within(home, "jkv", "pallas_kernels")
            if not public or (module is jkv.testing and not within(home, "jkv.testing")):
                continue
            yield f"{module.__name__}.{name}", value
            if not inspect.isclass(value):
                continue
            for base in value.__mro__:
                if within(base.__module__, "jkv", "pallas_kernels"):
                    for member, raw in vars(base).items():
                        if not member.startswith("_") and (callable(raw) or isinstance(raw, property | classmethod)):
                            yield f"{module.__name__}.{name}.{member}", getattr(value, member)


def test_everything_public_is_documented():
    objects = dict(public_objects())
    assert {"jkv.SlotSpace", "jkv.MLATokenToKVPool.set_mla_kv_buffer"} <= set(objects)
    undocumented = []
    for name, value in objects.items():
        doc = inspect.getdoc(value) or ""
        # A dataclass without a docstring gets its signature for one.
        if len(doc.split()) < 4 or (inspect.isclass(value) and doc.startswith(f"{value.__name__}(")):
            undocumented.append(name)
    assert not undocumented


def test_everything_public_is_annotated():
    bare = []
    for name, value in public_objects():
        function = value if inspect.isfunction(value) or inspect.ismethod(value) else None
        if function is not None:
            signature = inspect.signature(function)
            hints = [signature.return_annotation] + [
                parameter.annotation for parameter in signature.parameters.values() if parameter.name != "self"
            ]
            bare += [name] * (inspect.Signature.empty in hints)
    assert not bare


def test_importing_the_library_touches_no_device():
    library = [name for name in modules(*LIBRARY) if not name.endswith((".mosaic", ".triton"))]
    code = "\n".join(
        [
            *(f"import {name}" for name in library),
            "import jax",
            "try:",
            "    jax.devices()",  # proves that any look at a device would have failed
            "except RuntimeError:",
            "    print('untouched')",
        ]
    )
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "untouched", done.stderr


@pytest.mark.newest_jax
def test_the_readme_names_this_jax_as_supported():
    import jax

    major, minor = jax.__version_info__[:2]
    assert f"{major}.{minor}" in (ROOT / "README.md").read_text()
