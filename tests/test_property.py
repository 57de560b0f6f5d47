"""Random sequences of operations on every kind of pool, against a plain NumPy model of it."""

import collections
import dataclasses
import itertools
import zlib

import hypothesis
import pytest
from property_cases import CONTEXTS, FACTORS, LAYOUTS, MESHES, Case, cases
from property_driver import ID_KINDS, OPS, Run, sequences

CELLS = list(itertools.product(CONTEXTS, LAYOUTS))
QUICK, SLOW = 54, 340  # sequences a cell: over 50 each, and over 2,000 in all


def play_cell(context: str, layout: str, count: int, derandomize: bool) -> collections.Counter[str]:
    coverage: collections.Counter[str] = collections.Counter()
    table = cases(context, layout)
    for case in table:
        play_case(case, -(-count // len(table)), derandomize, coverage)
    return coverage


def play_case(
    case: Case,
    count: int,
    derandomize: bool,
    coverage: collections.Counter[str],
    phases: tuple[hypothesis.Phase, ...] = tuple(hypothesis.Phase),
) -> None:
    settings = hypothesis.settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.seed(zlib.crc32(repr(case).encode()))
    @hypothesis.given(sequence=sequences)
    def play(sequence):
        hypothesis.note(str(case))
        Run(case, coverage).play(*sequence)

    play()


def assert_covered(coverage: collections.Counter[str], context: str, layout: str, count: int) -> None:
    table = cases(context, layout)
    least = {
        "sequences": count,
        "verdicts": count // 4,
        "move: overlaps": count // 10,
        "filled": count // 4,
        **{f"op: {op}": count // (16 if op == "set_mla" else 4) for op in OPS},
        **{f"id: {kind}": count // 8 for kind in ID_KINDS},
    }
    for name in ("mesh", "kind", "dtype", "source", "ids", "checks", "interleave", "padding_slot", "start_layer"):
        least |= {f"{name}: {getattr(case, name)}": count // len(table) for case in table}
    if any(case.traced_layers for case in table):
        least["layer: not held"] = count // 10
    if any(case.eager for case in table):
        least["ids: none"] = count // 10
    print("\n".join(f"{context}, {layout}: {what}: {n}" for what, n in sorted(coverage.items())))
    missing = {what: (coverage[what], n) for what, n in least.items() if coverage[what] < n}
    assert not missing, f"covered (got, at least): {missing}"


@pytest.mark.parametrize(("context", "layout"), CELLS)
def test_random_sequences_leave_every_row_as_the_model_says(context, layout):
    coverage = play_cell(context, layout, QUICK, derandomize=True)
    assert_covered(coverage, context, layout, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "layout"), CELLS)
def test_two_thousand_random_sequences_leave_every_row_as_the_model_says(context, layout):
    coverage = play_cell(context, layout, SLOW, derandomize=False)
    assert_covered(coverage, context, layout, SLOW)


def test_the_table_of_cases_covers_every_value_in_every_context_and_every_mesh_in_both_sharded_contexts():
    every = {context: [case for layout in LAYOUTS for case in cases(context, layout)] for context in CONTEXTS}
    for context, table in every.items():
        for name, values in FACTORS.items():
            seen = {dataclasses.asdict(case)[name] for case in table}
            fixed = {"eager": context != "local", "check_vma": context != "shard_map", "mesh": True}.get(name, False)
            assert fixed or seen == set(values), (context, name, seen)
    for context in ("mesh", "shard_map"):
        assert {case.mesh for case in every[context]} == set(MESHES), context
    assert any(not case.on_mesh for case in every["local"])
    for dtype in FACTORS["dtype"]:
        for layout in LAYOUTS:
            assert any(case.dtype == dtype for context in CONTEXTS for case in cases(context, layout)), (dtype, layout)
