"""Control flow in an eager scope: results, dumped operators and backward are torch's own."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from functorch.experimental.control_flow import map as torch_map
from torch._higher_order_ops import scan, while_loop

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
    return Counter(call.target.split(".")[1] for call in rank.calls)


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
