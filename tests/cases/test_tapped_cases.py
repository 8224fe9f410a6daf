"""Every case with the engine `tap`: the model's result, and a dump that is complete or says why."""

from __future__ import annotations

import pytest

from tests.cases import CASES, load
from tests.cases.checks import assert_asked_targets, assert_same_result, targets_of
from tests.support.replay import assert_replays

INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
every_case = pytest.mark.parametrize("name", CASES)
every_inner = pytest.mark.parametrize("inner", INNER)


@every_inner
@every_case
def test_the_result_equals_that_of_the_inner_backend_alone(ran, name, inner):
    assert_same_result(ran(name, inner, "tap"), inner)


@every_inner
@every_case
def test_the_dump_holds_what_the_case_asks_for(ran, name, inner):
    run = ran(name, inner, "tap")
    assert run.dump.problems == []
    assert_asked_targets(load(name), targets_of(run))


@every_case
def test_every_call_of_an_uncompiled_graph_gives_its_dumped_outputs_again(ran, name):
    assert_replays(ran(name, "aot_eager", "tap").dump)
