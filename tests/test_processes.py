"""One pool over several processes: each sees what a single process sees, reads and errors included."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def start(devices: int, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
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


@pytest.mark.two_process
def test_two_processes_write_read_move_and_generate_as_one():
    port = free_port()
    processes = [start(2, f"127.0.0.1:{port}", "2", str(i)) for i in range(2)]
    try:
        several = [result_of(p) for p in processes]
    finally:
        for p in processes:
            p.kill()
    alone = result_of(start(4))
    assert several[0] == several[1] == alone
    bad = "2 of 5 slot ids outside [0, 48) = (size 8 + page_size 4) * dcp_size 4; min -1, max 48"
    assert alone["pool"]["mla"]["error"] == f"set_kv_buffer (MLA), layer 1: {bad}"
    assert alone["pool"]["mha"]["eager error"] == f"get_kv (MHA), layer 1: {bad}"
    assert alone["pool"]["mha"]["moved"][1] == alone["pool"]["mha"]["read"][1] != alone["pool"]["mha"]["read"][2]
    assert alone["pool"]["mha"]["restored"][:2] == alone["pool"]["mha"]["moved"][1::-1]
    assert all(len(tokens) == 6 for tokens in alone["text"]["tokens"])
