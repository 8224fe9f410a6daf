"""Run a function with scopes in bodies, and check what holds for every such dump."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support.account import assert_adds_up, rows
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.capture.account import account
from torchair_scope.store.reader import Call, Rank, read


def dump(
    function: Callable, inputs: tuple, inner: str, path: Path, *, backward: bool = False
) -> Rank:
    """Compile and run `function`; the results have to be those of the inner backend alone.

    Every call has to replay, and to be listed in its graph's record.
    """
    options = {"path": str(path), "backend": inner}
    account.forget()
    actual = _run(function, inputs, backward, backend="torchair_scope", options=options)
    told = rows()
    expected = _run(function, inputs, backward, backend=inner)
    if inner == "aot_eager":
        assert difference(actual, expected) is None
    else:
        torch.testing.assert_close(actual, expected)
    (rank,) = read(path).ranks
    assert rank.problems == []
    assert_adds_up(told, read(path))
    assert_replays(read(path))
    for call in rank.calls:
        assert _entry(call) in _entries(rank, call.graph)
    return rank


def _run(function: Callable, inputs: tuple, backward: bool, **backend: Any) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = tuple(x.detach().clone().requires_grad_(backward) for x in inputs)
    values = tree_leaves(torch.compile(function, fullgraph=True, **backend)(*inputs))
    if backward:
        sum(value.sum() for value in values if value.requires_grad).backward()
    gradients = [x.grad for x in inputs if x.grad is not None]
    return [value.detach() for value in values] + gradients


def _entry(call: Call) -> tuple[str, str | None, str]:
    name = call.record.get("listed_as", call.node)
    return name, call.record.get("body"), call.target


def _entries(rank: Rank, graph: int) -> list[tuple[str, str | None, str]]:
    (record,) = (record for record in rank.graphs if record["graph"] == graph)
    return [(node["name"], node.get("body"), node["target"]) for node in record["nodes"]]


def calls_of(rank: Rank, direction: str) -> list[Call]:
    """The calls of the graphs of one direction, in order of execution."""
    graphs = {graph["graph"] for graph in rank.graphs if graph["direction"] == direction}
    return [call for call in rank.calls if call.graph in graphs]


def names(calls: list[Call]) -> list[str]:
    """The names of calls, as their files have them."""
    return [call.node for call in calls]


gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
