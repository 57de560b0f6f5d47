"""The README's code runs as it stands, prints what it says, and names commands, options and modules that exist."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("checks", ["0", "1"], ids=["checks off", "checks on"])
def test_the_code_runs_and_prints_what_the_text_says(checks: str):
    env = {**os.environ, "JKV_ENABLE_ASYNC_ASSERT": checks}
    code = "\n".join(blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(blocks("text"))


def test_the_first_use_is_short():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith(("import", "#"))]
    assert len(lines) <= 20


@pytest.mark.parametrize("block", blocks("bash"))
def test_each_command_is_one_line_and_starts_from_nothing(block: str):
    assert block.count("\n") == 1
    assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_every_module_that_a_command_runs_exists():
    modules = set(re.findall(r"python -m ((?:examples|benchmarks|jkv)\.\w+)", README))
    assert "examples.generate" in modules
    for module in modules:
        assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), module


def test_relative_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_worked_example_is_right():
    import jkv

    slots = jkv.SlotSpace(size=8192, page_size=64, dcp_size=4)
    highest = slots.bound - 1
    for text in (
        f"| {slots.rows} |",
        f"| {slots.bound} |",
        f"| {highest}: rank {slots.owner(highest)}, row {slots.row(highest)} |",
        f"| {slots.capacity} |",
        f"| {slots.alloc_page_size} |",
    ):
        assert text in README
