"""One pool over several processes: each sees what a single process sees, and the death of another one too."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def start(devices: int, *arguments: str) -> subprocess.Popen:
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JKV_ENABLE_ASYNC_ASSERT": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "tests" / "process_worker.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result_of(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def alone() -> dict:
    return result_of(start(4))


@pytest.mark.two_process
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_write_read_move_generate_and_serve_as_one(alone: dict, count: int):
    port = free_port()
    processes = [start(4 // count, f"127.0.0.1:{port}", str(count), str(i)) for i in range(count)]
    try:
        several = [result_of(p) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert several == [alone] * count
    bad = "2 of 5 slot ids outside [0, 48) = (size 8 + page_size 4) * dcp_size 4; min -1, max 48"
    assert alone["pool"]["mla"]["error"] == f"set_kv_buffer (MLA), layer 1: {bad}"
    assert alone["pool"]["mha"]["eager error"] == f"get_kv (MHA), layer 1: {bad}"
    assert alone["pool"]["mha"]["moved"][1] == alone["pool"]["mha"]["read"][1] != alone["pool"]["mha"]["read"][2]
    assert alone["pool"]["mha"]["restored"][:2] == alone["pool"]["mha"]["moved"][1::-1]
    assert all(len(tokens) == 6 for tokens in alone["text"]["tokens"])
    served = alone["served"]
    assert (served["requests"], served["identical"], served["leaked_pages"]) == (5, 5, 0)
    assert served["retractions"] > 0
    assert served["prefix_hit_tokens"] > 0


@pytest.mark.two_process
@pytest.mark.parametrize(("victim", "how"), [(1, "SIGKILL"), (0, "SIGKILL"), (1, "SIGSTOP")])
def test_the_others_end_with_an_error_when_a_process_dies_in_the_middle_of_decoding(victim: int, how: str):
    """Stopped, a process keeps its connections open, as a lost host does: only the missing heartbeats tell."""
    address = f"127.0.0.1:{free_port()}"
    processes = [start(2, address, "2", str(i), "10") for i in range(2)]
    other = processes[1 - victim]
    try:
        for p in processes:
            lines = iter(p.stdout.readline, "")
            assert sum(line == "token\n" for line, _ in zip(lines, range(10), strict=False)) > 1
        processes[victim].send_signal(getattr(signal, how))
        began = time.monotonic()
        _, err = other.communicate(timeout=60)
        seconds = time.monotonic() - began
    finally:
        for p in processes:
            p.kill()
    assert other.returncode != 0
    assert seconds < 60
    assert "most likely indicates that another task died" in err
    if victim:  # task 0 runs the service that knows all the others
        assert f"Task {victim} heartbeat timeout" in err or f"unhealthy (stopped sending heartbeats):\n{victim}" in err
