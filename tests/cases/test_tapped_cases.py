"""Every case with the engine `tap`: the model's result, and a dump that is complete or says why."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cases import CASES, load
from tests.support.bits import difference
from tests.support.replay import assert_replays

INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
every_case = pytest.mark.parametrize("name", CASES)
every_inner = pytest.mark.parametrize("inner", INNER)


@every_inner
@every_case
def test_the_result_equals_that_of_the_inner_backend_alone(ran, name, inner):
    run = ran(name, inner, "tap")
    for fact in ("values", "gradients", "state"):
        actual, expected = getattr(run.result, fact), getattr(run.reference, fact)
        if inner == "aot_eager":
            assert difference(_plain(actual), _plain(expected)) is None, fact
        else:
            torch.testing.assert_close(_plain(actual), _plain(expected), equal_nan=True)


@every_inner
@every_case
def test_the_dump_holds_what_the_case_asks_for(ran, name, inner):
    case, run = load(name), ran(name, inner, "tap")
    assert run.dump.problems == []
    targets = Counter(call.target for call in run.calls)
    for part in case.MUST:
        assert _count(targets, part), f"no {part} among {dict(targets)}"
    for part in getattr(case, "MUST_NOT", []):
        assert not _count(targets, part), f"{part} among {dict(targets)}"


@every_case
def test_every_call_of_an_uncompiled_graph_gives_its_dumped_outputs_again(ran, name):
    assert_replays(ran(name, "aot_eager", "tap").dump)


def _count(targets, part):
    return sum(count for target, count in targets.items() if part in target)


def _plain(values):
    """Local shards for DTensors, no `requires_grad`, no None."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {
        key: (value.to_local() if hasattr(value, "to_local") else value).detach()
        for key, value in pairs
        if value is not None
    }
