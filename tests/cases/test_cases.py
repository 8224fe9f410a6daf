"""What holds for every case: results, the dump that its names ask for, and replay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torchair_scope
from tests.cases import CASES, load
from tests.cases.checks import assert_asked_targets, assert_same_result, count, targets_of
from tests.support.account import assert_adds_up
from tests.support.replay import assert_replays

INNER = ["aot_eager", "inductor"]
WARNS = {
    "case_19_dead_code_in_scope": "removed as dead code",
    "case_34_graph_break_in_scope": "runs uncompiled",
}
# Eager code has other operators for these than a graph has.
IN_EAGER_CODE = {
    "auto_functionalized": "bugcase10.scatter_row",
    "invoke_subgraph": "aten.",
    "native_dropout": "aten.bernoulli_",
}

# A graph among the arguments, random numbers, and values that are not defined.
CANNOT_BE_REPLAYED = ("invoke_subgraph", "aten.native_dropout", "aten.bernoulli_", "aten.empty")

every_case = pytest.mark.parametrize("name", CASES)
every_inner = pytest.mark.parametrize("inner", INNER)


@every_inner
@every_case
def test_the_result_equals_that_of_the_inner_backend_alone(ran, name, inner):
    assert_same_result(ran(name, inner), inner)


@every_inner
@every_case
def test_the_dump_holds_what_the_case_asks_for(ran, name, inner):
    case, run = load(name), ran(name, inner)
    targets = targets_of(run)
    assert_asked_targets(case, targets)
    for part, number in getattr(case, "COUNT", {}).items():
        assert count(targets, part) == number, dict(targets)
    for part, number in getattr(case, "COUNT_MIN", {}).items():
        assert count(targets, part) >= number, dict(targets)
    for part, number in getattr(case, "N_INPUT_TENSORS", {}).items():
        for call in run.calls:
            if part in call.target:
                assert _number_of_tensors(call.load_args()) == number


@every_inner
@every_case
def test_every_call_gives_its_dumped_outputs_again(ran, name, inner):
    verdicts = assert_replays(ran(name, inner).dump)
    if not getattr(load(name), "RANDOM", False):
        run = [verdict for verdict in verdicts if verdict.detail != "takes a graph"]
        assert {verdict.kind for verdict in run} == {"equal"}


@every_inner
@every_case
def test_the_dump_has_no_problems_and_the_run_no_warnings(ran, name, inner):
    run = ran(name, inner)
    assert run.dump.problems == []
    new = _texts(run.result.warnings) - _texts(run.reference.warnings)
    assert all(name in WARNS and WARNS[name] in text for text in new)
    assert bool(new) == (name in WARNS)


@pytest.mark.parametrize("inner", [*INNER, "golden"])
@every_case
def test_the_account_adds_up_and_tells_of_every_call(ran, name, inner):
    run = ran(name, inner)
    assert_adds_up(run.account, run.dump)
    assert any(row.dumped for row in run.account)
    if inner == "golden":
        assert sum(row.dumped for row in run.account) == len(run.calls)


@every_case
def test_operators_stay_whole_with_every_inner_compiler(ran, name):
    assert _operators(ran(name, "inductor")) == _operators(ran(name, "aot_eager"))


@every_case
def test_a_golden_run_changes_nothing_and_warns_of_nothing(ran, name):
    run = ran(name, "golden")
    assert_same_result(run, "golden")
    assert run.dump.problems == []
    assert _texts(run.result.warnings) <= _texts(run.reference.warnings)


@every_case
def test_a_golden_run_dumps_what_the_case_asks_for(ran, name):
    case, calls = load(name), ran(name, "golden").calls
    targets = Counter(call.target for call in calls)
    for part in (*case.MUST, *getattr(case, "MUST_NESTED", [])):
        assert count(targets, IN_EAGER_CODE.get(part, part)), f"no {part} among {dict(targets)}"
    for part in getattr(case, "MUST_NOT", []):
        assert not count(targets, part), f"{part} among {dict(targets)}"
    verdicts = zip(calls, assert_replays(ran(name, "golden").dump), strict=True)
    skipped = {call.target for call, verdict in verdicts if verdict.kind == "skipped"}
    if not getattr(case, "RANDOM", False):
        assert all(target.startswith("aten.empty") for target in skipped)


@every_inner
@pytest.mark.parametrize("name", [name for name in CASES if hasattr(load(name), "MUST_NESTED")])
def test_operators_in_bodies_are_dumped(ran, name, inner):
    case, run = load(name), ran(name, inner)
    targets = Counter(call.target for call in run.calls)
    assert [count(targets, part) for part in case.MUST_NESTED] == [1] * len(case.MUST_NESTED)
    assert not any(count(targets, part) for part in getattr(case, "MUST_NOT", []))


def _operators(run):
    directions = {graph["graph"]: graph["direction"] for graph in run.dump.ranks[0].graphs}
    return Counter((directions[call.graph], call.step, call.target) for call in run.calls)


def _texts(caught):
    return {str(warning.message) for warning in caught}


def _number_of_tensors(args):
    return sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))


@pytest.mark.parametrize("inner", [*INNER, "golden"])
@every_case
def test_replay_accuses_no_call_and_has_a_reason_for_each(ran, name, inner):
    run = ran(name, inner)
    replays = torchair_scope.replay(run.dump.folder)
    assert len(replays) == len(run.calls)
    assert [each for each in replays if each.verdict == "bug"] == []
    assert all(each.reason for each in replays)
    judged = {each.target for each in replays if each.verdict == "rounding"}
    unjudged = {each.target for each in replays if each.verdict == "cannot"} - judged
    assert all(target.startswith(CANNOT_BE_REPLAYED) for target in unjudged), unjudged
