"""Gradients that `torch.func` takes of a scope, from outside of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.replay import assert_replays
from torchair_scope.scope import data_dump, disabled, summary
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning

# Torch's own, when it first meets forward mode, and a Jacobian in Inductor.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]


def scoped(x):
    with data_dump("mine"):
        x = x.sin() * x
    return x.exp().sum()


def grad(x):
    return torch.func.grad(scoped)(x).tan()


def vjp(x):
    value, gradients = torch.func.vjp(scoped, x)
    return gradients(torch.ones_like(value))[0]


def jacrev(x):
    return torch.func.jacrev(scoped)(x)


def grad_of_each(x):
    return torch.func.vmap(torch.func.grad(scoped))(x)


def grad_of_grad(x):
    return torch.func.grad(lambda x: torch.func.grad(scoped)(x).sum())(x)


def targets(path):
    (rank,) = read(path).ranks
    assert rank.problems == []
    assert {call.scope for call in rank.calls} == {"mine"}
    return Counter(call.target.split(".")[1] for call in rank.calls)


FIRST_ORDER = {"sin": 1, "cos": 1, "mul": 4, "add": 1}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [grad, vjp, jacrev, grad_of_each])
def test_compiled_gradients_of_a_scope_are_dumped_and_nothing_else(dump_path, function, inner):
    x = torch.randn(2, 3)
    options = {"path": str(dump_path), "backend": inner}
    compiled = torch.compile(
        function, backend="torchair_scope", options=options, fullgraph=True, dynamic=False
    )
    result = compiled(x)
    with disabled():
        torch.testing.assert_close(result, function(x))
    if function is jacrev:
        assert targets(dump_path)["cos"] == 1
    else:
        assert targets(dump_path) == FIRST_ORDER
    assert_replays(read(dump_path))
    (row,) = summary().rows
    assert row.tagged == row.dumped + sum(row.missing.values())


def test_second_derivatives_are_dumped(dump_path):
    x = torch.randn(3)
    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(
        grad_of_grad, backend="torchair_scope", options=options, fullgraph=True
    )
    compiled(x)
    found = targets(dump_path)
    assert found["neg"] == 1  # of the cosine
    assert found["exp"] == 0
    assert_replays(read(dump_path))


def test_a_backward_of_such_gradients_is_dumped(dump_path):
    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(grad, backend="torchair_scope", options=options, fullgraph=True)
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    compiled(x).sum().backward()
    with disabled():
        grad(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert targets(dump_path)["neg"] == 1
    assert_replays(read(dump_path))


@pytest.mark.parametrize("function", [grad, vjp, jacrev, grad_of_each])
def test_in_eager_code_it_is_said_once_that_they_are_not_dumped(dump_path, monkeypatch, function):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    with pytest.warns(DumpWarning, match=r"scope 'mine' opened at test_trans.*torch\.func\.grad"):
        function(torch.randn(2, 3))
    function(torch.randn(2, 3))  # Warnings are errors: it is not said again.
    assert targets(dump_path) == {"sin": 1 * 2, "mul": 1 * 2}
    (row,) = summary().rows
    assert "torch.func" in row.remark


@pytest.mark.parametrize("function", [grad, vjp, grad_of_each])
def test_a_scope_around_sees_them_in_eager_code(dump_path, monkeypatch, function):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    x = torch.randn(2, 3)
    with data_dump("outer"):
        function(x)
    calls = read(dump_path).ranks[0].calls
    assert "aten.cos.default" in {call.target for call in calls if call.scope == "outer"}
    assert "aten.sin.default" in {call.target for call in calls if call.scope == "outer/mine"}


def test_vmap_and_forward_mode_are_dumped_in_the_scope_itself(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    torch.func.vmap(scoped)(torch.randn(2, 3))
    x = torch.randn(3)
    torch.func.jvp(scoped, (x,), (x,))
    assert targets(dump_path)["cos"] == 1
