"""What every test runs under: eight CPU devices, checks on, no verdict left behind, no required test skipped."""

import collections
import os
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Markers (comma-separated) whose tests must run: a skip is a failure, and so is a marker that no passing test has.
REQUIRED_MARKERS = frozenset(filter(None, os.environ.get("JKV_REQUIRE", "").split(",")))

# Hypothesis caches what it knows of Unicode and of the code's constants even without a database: not in the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), "jkv-hypothesis"))
hypothesis.settings.register_profile("jkv", deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("jkv-ci", hypothesis.settings.get_profile("jkv"), derandomize=True)
hypothesis.settings.load_profile("jkv-ci" if os.environ.get("CI") else "jkv")

_passed: collections.Counter[str] = collections.Counter()


def _selects_gpu(marker_expression: str) -> bool:
    return "gpu" in marker_expression.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could choose its platform and device count")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=8".strip()
    # The CUDA plugin may be installed for compiling ahead, without the libraries that it would run with.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("JKV_ENABLE_ASYNC_ASSERT", "1")
    if not _selects_gpu(config.getoption("markexpr")):
        os.environ["JAX_PLATFORMS"] = "cpu"
    # A misspelt requirement would otherwise never fail.
    known = {line.split(":")[0] for line in config.getini("markers")}
    if unknown := REQUIRED_MARKERS - known:
        raise pytest.UsageError(f"JKV_REQUIRE names unknown markers: {', '.join(sorted(unknown))}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import jax

    if jax.__version_info__ < (0, 12):
        for item in items:
            if item.get_closest_marker("newest_jax"):
                item.add_marker(pytest.mark.skip(reason=f"needs the newest JAX, this is {jax.__version__}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    required = sorted(REQUIRED_MARKERS.intersection(mark.name for mark in item.iter_markers()))
    if report.skipped and required and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, but JKV_REQUIRE asks for {', '.join(required)}: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.update(REQUIRED_MARKERS.intersection(report.keywords))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # under xdist only the controller sees every report
    missing = sorted(marker for marker in REQUIRED_MARKERS if not _passed[marker])
    if missing and not session.config.option.collectonly:
        sys.stderr.write(f"\nJKV_REQUIRE: no test passed that is marked {', '.join(missing)}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_verdict_left_pending() -> Iterator[None]:
    """A test that lets a bad id pass unseen fails, and cannot disturb the next one."""
    yield
    jkv = sys.modules.get("jkv")
    if jkv is None:
        return
    errors = []
    for _ in range(1000):  # one verdict a call; bounded in case a broken queue never empties
        try:
            jkv.wait_for_checks()
        except jkv.KVIndexError as error:
            errors.append(error)
        else:
            break
    if errors:
        pytest.fail(f"{len(errors)} verdicts were left pending, the first: {errors[0]}", pytrace=False)
