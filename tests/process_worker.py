"""What each process of a jax.distributed program runs in test_processes.py; prints one JSON line.

python process_worker.py ADDRESS PROCESSES PROCESS: 4 devices in all, evenly spread. Without arguments: alone, on all.
python process_worker.py ADDRESS PROCESSES PROCESS HEARTBEAT: decodes without end, a line a token; HEARTBEAT seconds
without a sign of life are another process's death.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

DCP = 4


def use_pool(mesh) -> dict:
    """Writes, reads, moves, copies to the host and back, in a step and eagerly, and lets a probe fire."""
    import jkv

    result = {}
    pools = {
        "mha": lambda: jkv.MHATokenToKVPool.create(
            size=8, page_size=4, dtype=jnp.bfloat16, head_num=2, head_dim=4, layer_num=2, mesh=mesh, dcp_axis="dcp",
            stacked=True,
        ),
        "mla": lambda: jkv.MLATokenToKVPool.create(
            size=8, page_size=4, dtype=jnp.float32, kv_lora_rank=6, qk_rope_head_dim=2, layer_num=2, mesh=mesh,
            dcp_axis="dcp",
        ),
    }  # fmt: skip
    loc = np.array([17, 22, 47, 0, 16], np.int32)
    for name, create in pools.items():
        pool = create()
        shape = (5, 2, 4) if name == "mha" else (5, 1, 8)
        rows = np.arange(40, dtype=np.float32).reshape(shape) + 1
        values = (rows, rows + 1) if name == "mha" else (rows,)
        step = jkv.checked_jit(lambda p, loc, *rows: p.set_kv_buffer(1, loc, *rows), donate_argnums=0)
        pool = step(pool, loc, *values)
        jkv.wait_for_checks()
        eager = create().set_kv_buffer(1, loc, *values)
        moved = pool.move_kv_cache([23, 16, 40], [22, 17, 47])
        host = moved.get_cpu_copy([16, 23, 47, 40, 5])
        restored = create().load_cpu_copy(host, [31, 30, 29, 28, 27])
        result[name] = {
            "read": np.asarray(pool.get_kv(1, [47, 17, 16, 99 % 48])[0], np.float32).tolist(),
            "eager": np.asarray(eager.get_kv(1, loc)[0], np.float32).tolist(),
            "moved": np.asarray(moved.get_kv(1, [23, 16, 40, 22])[0], np.float32).tolist(),
            "host": [w.tolist() for w in host.words],
            "restored": np.asarray(restored.get_kv(1, [31, 30, 29, 28, 27])[0], np.float32).tolist(),
        }
        bad = np.array([17, 48, 30, 31, -1], np.int32)
        pool = step(pool, bad, *values)
        try:
            jkv.wait_for_checks()
        except jkv.KVIndexError as error:
            result[name]["error"] = str(error)
        try:
            pool.get_kv(1, bad)
        except jkv.KVIndexError as error:
            result[name]["eager error"] = str(error)
        # The rank that owns a row is the one whose devices hold it.
        for shard in jax.tree.leaves(pool)[-1].addressable_shards:
            rank = mesh.devices.ravel().tolist().index(shard.device)
            local = np.asarray(shard.data)[1] if name == "mha" else np.asarray(shard.data)
            written = [int(r) for r in np.flatnonzero(local.any((1, 2)))]
            assert written == [row for row in range(1, 12) if row * DCP + rank in {16, 17, 22, 30, 31, 47}], written
    return result


def generate() -> dict:
    """Greedy tokens of the tiny model, striped over all devices."""
    from examples.generate import generate as run
    from examples.models import MODELS

    prompts = ["one slot space", "a", "every door of every pool works under DCP"]
    texts = run(MODELS["tiny"](), prompts, dcp=DCP, kv_dtype="f32", max_new_tokens=6, batch=2, page_size=4).texts
    return {"tokens": [text.token_ids for text in texts]}


def serve() -> dict:
    """Texts of more requests than fit: every process must choose alike whom to put off, and which pages to evict."""
    import jkv
    from examples import serve as example
    from examples.models import MODELS
    from examples.workload import Work

    works = [Work([40 + n % 3] * 20, 30) for n in range(5)]
    with jkv.enable_checks():
        result = example.serve(MODELS["tiny"](), works, dcp=DCP, kv_dtype="f32", pool_tokens=112, lanes=4)
    numbers = result.as_json()
    del numbers["tokens_per_second"]
    return {"texts": result.texts, **numbers}


def decode_without_end() -> None:
    """Prints a line a token until something goes wrong."""
    from examples.generate import generate as run
    from examples.models import MODELS

    def tell(*_) -> None:
        sys.stdout.write("token\n")
        sys.stdout.flush()

    model = MODELS["tiny"]()
    while True:
        run(model, ["one slot space"], dcp=DCP, max_new_tokens=400, on_token=tell)


def main() -> None:
    """Joins the program, runs all parts, prints what this process saw."""
    if len(sys.argv) > 1:
        address, processes, process = sys.argv[1:4]
        heartbeat = int(sys.argv[4]) if len(sys.argv) > 4 else 60
        jax.distributed.initialize(address, int(processes), int(process), heartbeat_timeout_seconds=heartbeat)
    assert len(jax.devices()) == DCP, jax.devices()
    if len(sys.argv) > 4:
        decode_without_end()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("dcp",))
    replicated = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, P()))(np.ones(4))
    assert float(np.asarray(replicated)) == 4
    sys.stdout.write(json.dumps({"pool": use_pool(mesh), "text": generate(), "served": serve()}) + "\n")


if __name__ == "__main__":
    main()
