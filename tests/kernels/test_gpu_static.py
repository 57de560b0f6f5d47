"""What `benchmarks.gpu_static` counts in a kernel's PTX, where it is known."""

import pytest
from aot import Call
from compiled import plugin
from test_deviceless import facts

from benchmarks import gpu_static

pytestmark = pytest.mark.deviceless


@pytest.mark.parametrize(
    ("call", "rows", "row_bytes", "loads", "stores", "blocks"),
    [
        # 2048 bytes are four accesses of a warp, of K and of V; each of four warps reads the id.
        (Call("scatter_kv", "llama-3-8b"), 1, 4096, "12", "8", 16),
        # 16 rows of 1024 and 128 bytes a block: the ids of all rows are read by each warp, to spread them over threads.
        (Call("scatter_mla", "deepseek-v3", n=16384), 16, 1152, "4.5", "2.25", 9),
    ],
    ids=["decode", "prefill"],
)
def test_accesses_are_those_of_the_row(call: Call, rows: int, row_bytes: int, loads: str, stores: str, blocks: int):
    if reason := plugin():
        pytest.skip(reason)
    try:
        ptxas = gpu_static.find_ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = facts("H200", call)
    plan = {"way": "tiles", "rows": -(-call.n // found["grids"][call.op][0]), "shared": 0}
    counted = gpu_static.count(found["ptx"][call.op], plan, row_bytes, "H200", ptxas)
    assert counted["rows a block"] == rows
    assert (counted["bytes a load"], counted["bytes a store"]) == ("16", "16")
    assert (counted["loads a row"], counted["stores a row"]) == (loads, stores)
    assert 16 <= counted["registers"] <= 64
    assert counted["KiB in flight"] == pytest.approx(blocks * rows * row_bytes / 1024, rel=0.3)
