"""What the probes cost: nothing when they are off, and how much when they are on.

Off: a step is compiled as it is, and again with every probe function replaced by one that does nothing at all; the two
compiled texts must be the same, byte for byte. On: the step goes through `jkv.checked_jit` with checks on and off, in
turn, on donated pools; verdicts are collected as in a serving loop, by the next call.
"""

from benchmarks import report

report.one_core()

# ruff: noqa: E402
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv

SIZE, PAGE = 16384, 64
ROW_COUNTS = (1, 16, 256, 4096)
LAYERS = (1, 32)
PROBES = ("probe_ids", "probe_rows", "probe_layer")


def create(layers: int) -> Any:
    """The MLA pool that is written to."""
    return jkv.MLATokenToKVPool.create(
        size=SIZE,
        page_size=PAGE,
        dtype=jnp.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        stacked=True,
    )


def step(pool: Any, loc: jax.Array, nope: jax.Array, rope: jax.Array) -> Any:
    """Writes the rows to every layer."""

    def body(pool: Any, layer: jax.Array) -> tuple[Any, None]:
        return pool.set_mla_kv_buffer(layer, loc, nope, rope), None

    return jax.lax.scan(body, pool, jnp.arange(pool.layer_num))[0]


def rows(count: int) -> tuple[jax.Array, ...]:
    """Ids and rows to write."""
    rng = np.random.default_rng(count)
    loc = jnp.asarray(rng.permutation(np.arange(PAGE, SIZE + PAGE))[:count], jnp.int32)
    return (loc, *(jnp.asarray(rng.standard_normal((count, 1, width)), jnp.bfloat16) for width in (512, 64)))


@contextlib.contextmanager
def without_probes() -> Iterator[int]:
    """Replaces the probe functions wherever the library holds them; gives the number of places."""
    import jkv.checks

    originals = {name: getattr(jkv.checks, name) for name in PROBES}
    places = [
        (module, key, value)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").split(".")[0] == "jkv"
        for key, value in list(vars(module).items())
        if any(value is original for original in originals.values())
    ]
    try:
        for module, key, _ in places:
            setattr(module, key, lambda *args, **kwargs: None)
        yield len(places)
    finally:
        for module, key, value in places:
            setattr(module, key, value)


def compiled_text(count: int) -> str:
    """The step's optimised program, traced and compiled afresh with checks off."""
    jax.clear_caches()
    with jkv.enable_checks(False):
        return jkv.checked_jit(step, donate_argnums=0).lower(create(LAYERS[-1]), *rows(count)).compile().as_text()


def measure(layers: int, count: int, **timing: Any) -> dict[str, Any]:
    """Median times of the step with checks off and on."""
    args = rows(count)

    def contender(on: bool) -> Callable[[], None]:
        held = [create(layers)]
        jitted = jkv.checked_jit(step, donate_argnums=0)

        def run() -> None:
            with jkv.enable_checks(on):
                held[0] = jax.block_until_ready(jitted(held[0], *args))

        return run

    times = report.interleaved({"off": contender(False), "on": contender(True)}, **timing)
    jkv.wait_for_checks()
    return {"layers": layers, "rows": count, **times, "on/off": times["on"] / times["off"]}


def main() -> None:
    """Prints whether the texts agree, and the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each line of the table (default 4)")
    options = parser.parse_args()

    texts = []
    for context in (contextlib.nullcontext(0), without_probes()):
        with context as places:
            texts.append(compiled_text(16))  # one call site: the text names it
    plain, bare = texts
    if places < len(PROBES):
        raise SystemExit(f"found {places} probe functions, expected at least {len(PROBES)}: {', '.join(PROBES)}")
    jax.clear_caches()
    same = plain == bare
    print(f"checks off: {len(plain):,} characters of compiled text, {'the same' if same else 'NOT THE SAME'}")
    print(f"as without the {places} probe functions in the library's modules\n")

    timing = {"seconds": options.seconds, "clock": options.clock}
    measurements = [measure(layers, count, **timing) for layers in LAYERS for count in ROW_COUNTS]
    lines = [
        [m["layers"], m["rows"], report.microseconds(m["off"]), report.microseconds(m["on"]), f"{m['on/off']:.2f}"]
        for m in measurements
    ]
    title = f"A step that writes N rows to each layer (JAX {jax.__version__})"
    print(report.table(title, ["layers", "N", "off, us", "on, us", "on/off"], lines))
    report.write_json(options.json, [{"same compiled text": same, "probe functions": places}, *measurements])
    sys.exit(not same)


if __name__ == "__main__":
    main()
