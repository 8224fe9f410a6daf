"""What holds for every case: results, the dump that its names ask for, and replay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.cases import CASES, load
from tests.support.bits import difference
from tests.support.replay import assert_replays

INNER = ["aot_eager", "inductor"]
UNSEEN = ["case_34_graph_break_in_scope", "case_35_scope_around_compiled_call"]
WARNS = ["case_19_dead_code_in_scope"]
NOW = [name for name in CASES if name not in UNSEEN]

every_case = pytest.mark.parametrize("name", CASES)
every_dumped_case = pytest.mark.parametrize("name", NOW)
every_inner = pytest.mark.parametrize("inner", INNER)


@every_inner
@every_case
def test_the_result_equals_that_of_the_inner_backend_alone(ran, name, inner):
    run = ran(name, inner)
    for fact in ("values", "gradients", "state"):
        actual, expected = getattr(run.result, fact), getattr(run.reference, fact)
        if inner == "aot_eager":
            assert difference(_plain(actual), _plain(expected)) is None, fact
        else:
            torch.testing.assert_close(_plain(actual), _plain(expected), equal_nan=True)


@every_inner
@every_dumped_case
def test_the_dump_holds_what_the_case_asks_for(ran, name, inner):
    case, calls = load(name), ran(name, inner).calls
    targets = Counter(call.target for call in calls)
    for part in case.MUST:
        assert _count(targets, part), f"no {part} among {dict(targets)}"
    for part in getattr(case, "MUST_NOT", []):
        assert not _count(targets, part), f"{part} among {dict(targets)}"
    for part, count in getattr(case, "COUNT", {}).items():
        assert _count(targets, part) == count, dict(targets)
    for part, count in getattr(case, "COUNT_MIN", {}).items():
        assert _count(targets, part) >= count, dict(targets)
    for part, count in getattr(case, "N_INPUT_TENSORS", {}).items():
        for call in calls:
            if part in call.target:
                assert _number_of_tensors(call.load_args()) == count


@every_inner
@every_dumped_case
def test_every_call_gives_its_dumped_outputs_again(ran, name, inner):
    verdicts = assert_replays(ran(name, inner).dump)
    if not getattr(load(name), "RANDOM", False):
        run = [verdict for verdict in verdicts if verdict.detail != "takes a graph"]
        assert {verdict.kind for verdict in run} == {"equal"}


@every_inner
@every_dumped_case
def test_the_dump_has_no_problems_and_the_run_no_warnings(ran, name, inner):
    run = ran(name, inner)
    assert run.dump.problems == []
    if name not in WARNS:
        assert _texts(run.result.warnings) <= _texts(run.reference.warnings)


@every_dumped_case
def test_operators_stay_whole_with_every_inner_compiler(ran, name):
    assert _operators(ran(name, "inductor")) == _operators(ran(name, "aot_eager"))


@every_inner
@pytest.mark.parametrize("name", UNSEEN)
def test_a_scope_that_tracing_does_not_see_is_warned_of_if_it_dumps_nothing(ran, name, inner):
    run = ran(name, inner)
    assert run.calls or any("scope" in str(w.message) for w in run.result.warnings)


@every_inner
@pytest.mark.parametrize("name", [name for name in CASES if hasattr(load(name), "MUST_NESTED")])
def test_operators_in_bodies_are_dumped(ran, name, inner):
    case, run = load(name), ran(name, inner)
    targets = Counter(call.target for call in run.calls)
    assert [_count(targets, part) for part in case.MUST_NESTED] == [1] * len(case.MUST_NESTED)
    assert not any(_count(targets, part) for part in getattr(case, "MUST_NOT", []))


def _operators(run):
    directions = {graph["graph"]: graph["direction"] for graph in run.dump.ranks[0].graphs}
    return Counter((directions[call.graph], call.step, call.target) for call in run.calls)


def _texts(caught):
    return {str(warning.message) for warning in caught}


def _count(targets, part):
    return sum(count for target, count in targets.items() if part in target)


def _number_of_tensors(args):
    return sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))


def _plain(values):
    """Local shards for DTensors, no `requires_grad`, no None."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {
        key: (value.to_local() if hasattr(value, "to_local") else value).detach()
        for key, value in pairs
        if value is not None
    }
