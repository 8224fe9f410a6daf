"""Control flow in an eager scope: results, dumped operators and backward are torch's own."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from functorch.experimental.control_flow import map as torch_map
from torch._higher_order_ops import scan, while_loop

import torchair_scope as torchair
from tests.support.account import assert_adds_up, rows
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.scope import data_dump, disabled
from torchair_scope.store.reader import read


@pytest.fixture(autouse=True)
def _dump_here(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))


def run_cond(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


def run_while_loop(x):
    return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x.tanh()), (torch.tensor(0), x))[1]


def run_scan(x):
    return scan(lambda carry, x: (carry + x.sin(), carry * x), torch.zeros(3), x)[1]


def run_map(x):
    return torch_map(lambda x: x.sin() * 2, x)


def outcome(function):
    """What a function returns for a tensor and the gradients, or the kind of its exception."""
    x = torch.linspace(-1, 2, 6).view(2, 3).requires_grad_()
    try:
        result = function(x * 1)
        if result.requires_grad:
            result.exp().sum().backward()
    except Exception as error:
        return type(error)
    return [result.detach(), x.grad]


def scoped(function):
    def run(x):
        with data_dump("mine"):
            return function(x)

    return run


def targets(path):
    (rank,) = read(path).ranks
    assert rank.problems == []
    return Counter(call.target.removeprefix("aten.").split(".")[0] for call in rank.calls)


def calls_forward(path):
    (rank,) = read(path).ranks
    backward = {graph["graph"] for graph in rank.graphs if graph["direction"] == "backward"}
    return [call for call in rank.calls if call.graph not in backward]


# What a body computes, and how often it runs.
EACH = {
    run_cond: ("sin", 1),
    run_while_loop: ("tanh", 3),
    run_scan: ("sin", 2),
    run_map: ("sin", 2),
}


@pytest.mark.parametrize("function", EACH)
def test_forward_is_that_without_a_scope_and_each_run_of_a_body_is_dumped(function, dump_path):
    x = torch.linspace(-1, 2, 6).view(2, 3)
    with data_dump("mine"):
        result = function(x)
    with disabled():
        assert difference(result, function(x)) is None
    name, times = EACH[function]
    assert targets(dump_path)[name] == times
    assert_replays(read(dump_path))
    assert_adds_up(rows(), read(dump_path))


def run_nested(x):
    def inner(y):
        return torch.cond(y.sum() > 1, lambda y: y.exp(), lambda y: y.cos(), (y,))

    return while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, inner(y)), (torch.tensor(0), x))[1]


def run_twice(x):
    return run_cond(run_cond(x))


@pytest.mark.parametrize("function", [*EACH, run_nested, run_twice])
def test_calls_in_bodies_have_the_names_lines_and_scopes_that_they_have_when_compiled(
    function, dump_path, tmp_path
):
    x = torch.linspace(-1, 2, 6).view(2, 3)
    scoped(function)(x)
    options = {"path": str(tmp_path / "compiled"), "backend": "aot_eager"}
    torch.compile(scoped(function), backend="torchair_scope", options=options)(x)
    eager, compiled = (
        [
            (call.node, call.operator, call.scope, call.source["line"])
            for rank in torchair.load(path).ranks
            for call in rank.calls
            if "__" in call.node or call.operator in ("cond", "while_loop", "scan", "map_impl")
        ]
        for path in (dump_path, tmp_path / "compiled")
    )
    assert eager == compiled
    assert len({name for name, *_ in eager}) == len(eager) > EACH.get(function, (None, 1))[1]


def test_an_eager_golden_of_control_flow_pairs_with_a_compiled_target_by_name(dump_path, tmp_path):
    x = torch.linspace(-1, 2, 6).view(2, 3)
    scoped(run_while_loop)(x)
    options = {"path": str(tmp_path / "compiled"), "backend": "aot_eager"}
    torch.compile(scoped(run_while_loop), backend="torchair_scope", options=options)(x)
    comparison = torchair.compare(dump_path, tmp_path / "compiled")
    pairs = {result.pair.target.node: result.pair for result in comparison.results}
    assert pairs["while_loop_0__2__tanh"].golden.node == "while_loop_0__2__tanh"
    inside = [pair for name, pair in pairs.items() if "__" in name]
    assert {pair.rule for pair in inside} == {"name"}


def test_a_scope_in_a_branch_in_an_eager_scope_dumps_the_branch_for_itself(dump_path):
    def branch(x):
        with data_dump("branch", ops="*tanh*"):
            return x.tanh() * 2

    def function(x):
        return torch.cond(x.sum() > 0, branch, lambda x: x.cos(), (x,)) + 1

    scoped(function)(torch.ones(3))
    scopes = {call.node: call.scope for call in calls_forward(dump_path)}
    assert scopes == {
        "sum_1": "mine",
        "gt": "mine",
        "cond": "mine",
        "cond_0__tanh": "mine/branch",
        "add": "mine",
    }
    told = {row.scope: row for row in rows()}
    assert told["mine/branch"].missing == {"not selected by ops": 1}
    assert told["branch"].remark is None
    assert_adds_up(rows(), read(dump_path))


@pytest.mark.parametrize("function", EACH)
def test_backward_is_that_without_a_scope_or_fails_as_it_does_without_one(function, dump_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, actual = outcome(function), outcome(scoped(function))
    if isinstance(expected, type):
        assert actual is expected
    else:
        assert difference(actual, expected) is None
        assert_replays(read(dump_path))
        assert_adds_up(rows(), read(dump_path))


def test_the_backward_of_a_branch_is_dumped(dump_path):
    x = torch.ones(3, requires_grad=True)
    scoped(run_cond)(x).exp().sum().backward()
    (rank,) = read(dump_path).ranks
    backward = {graph["graph"] for graph in rank.graphs if graph["direction"] == "backward"}
    assert "aten.cos.default" in {call.target for call in rank.calls if call.graph in backward}


def test_an_operator_that_writes_to_what_a_branch_was_given_changes_no_result(dump_path):
    def function(x):
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        x.add_(1)
        z = torch.cond(x.sum() > 0, lambda x: x * y, lambda x: x.cos(), (x,))
        x.mul_(y)
        return x, y, z

    with data_dump("mine"):
        actual = function(torch.ones(3) + 1)
    with disabled():
        assert difference(actual, function(torch.ones(3) + 1)) is None
    assert targets(dump_path)["add_"] == targets(dump_path)["mul_"] == 1
    assert_replays(read(dump_path))
