"""Compiled code that returns the same buffers at each call, and overwrites them at the next."""

from __future__ import annotations

import pytest
import torch

from tests.support.disks import slowed
from torchair_scope.scope import configure, data_dump
from torchair_scope.store.reader import read
from torchair_scope.store.run import complete_steps

STEPS = 3
ROWS = 50_000  # More than what is copied at once.


class Held:
    """Buffers that the compiled code holds, and returns themselves, as replays of graphs do."""

    def __init__(self, like):
        self.given = torch.empty_like(like)

    def filled(self, value):
        self.given.copy_(value)
        return self.given


class Foreign:
    """Memory that torch has not allocated; each call returns a new tensor of it."""

    def __init__(self, like):
        self.memory = torch.empty_like(like).numpy()

    def filled(self, value):
        given = torch.from_numpy(self.memory)
        given.copy_(value)
        return given


@pytest.fixture(params=[Held, Foreign])
def with_static_buffers(request):
    """An inner compiler."""

    def compile_graph(gm, example_inputs):
        buffers = {}

        def run(*args):
            results = gm(*args)
            for index, value in enumerate(results):
                if value is not None and index not in buffers:
                    buffers[index] = request.param(value)
            return [
                buffers[index].filled(value) if value is not None else None
                for index, value in enumerate(results)
            ]

        return run

    return compile_graph


@pytest.fixture(autouse=True)
def _slow_disk():
    """With `lag=1`, writers are still at a step's values when the next one begins."""
    with slowed(0.01):
        yield


@pytest.fixture(autouse=True)
def _no_defaults():
    with configure():
        yield


def block(x, weight):
    with data_dump("block"):
        h = torch.sin(x * weight)
        y = torch.exp(h) * h
    return y.cos()


def by_direction(path):
    """Calls by direction, step and name of operator."""
    complete_steps()
    (rank,) = read(path).ranks
    assert rank.problems == []
    directions = {graph["graph"]: graph["direction"] for graph in rank.graphs}
    return {(directions[c.graph], c.step, c.target): c for c in rank.calls}


@pytest.mark.parametrize("engine", ["tap", "interpret"])
@pytest.mark.parametrize("lag", [0, 1])
def test_files_of_training_hold_the_values_of_their_own_step(
    dump_path, with_static_buffers, lag, engine
):
    options = {"path": str(dump_path), "backend": with_static_buffers, "engine": engine}
    run = torch.compile(block, backend="torchair_scope", options=options, fullgraph=True)
    configure(lag=lag)
    inputs = [torch.randn(ROWS) for _ in range(STEPS)]
    weight = torch.rand(ROWS).requires_grad_()
    results = []
    for x in inputs:  # Nothing here gives writers the time to be done.
        weight.grad = None
        y = run(x, weight)
        y.sum().backward()
        results.append((y.detach().clone(), weight.grad.clone()))
    for x, (y, gradient) in zip(inputs, results, strict=True):
        alone = weight.detach().clone().requires_grad_()
        wanted = (torch.exp(torch.sin(x * alone)) * torch.sin(x * alone)).cos()
        assert torch.equal(y, wanted)
        torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), alone)[0])
    calls = by_direction(dump_path)
    assert {step for _, step, _ in calls} == set(range(STEPS))
    for step, x in enumerate(inputs):
        w = weight.detach()
        h = torch.sin(x * w)
        sin, exp = (calls["forward", step, f"aten.{name}.default"] for name in ("sin", "exp"))
        assert torch.equal(sin.load_args()[0][0], x * w)
        assert torch.equal(sin.load_outputs(), h)
        assert torch.equal(exp.load_outputs(), h.exp())
        cos = calls["backward", step, "aten.cos.default"]
        assert torch.equal(cos.load_args()[0][0], x * w)
        assert torch.equal(cos.load_outputs(), (x * w).cos())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps", [None, "0|2"])
def test_runs_of_one_graph_in_a_row_leave_the_values_of_each(
    dump_path, with_static_buffers, lag, steps
):
    def chain(x):
        with data_dump():
            for _ in range(6):
                x = torch.sin(x) * 2
            y = torch.tanh(x)
        return y + 1

    options = {"path": str(dump_path), "backend": with_static_buffers, "engine": "tap"}
    run = torch.compile(chain, backend="torchair_scope", options=options, fullgraph=True)
    configure(lag=lag, steps=steps)
    inputs = [torch.randn(ROWS) for _ in range(STEPS)]
    results = [run(x).clone() for x in inputs]
    calls = by_direction(dump_path)
    saved = range(STEPS) if steps is None else (0, 2)
    assert {step for _, step, _ in calls} == set(saved)
    for step, (x, result) in enumerate(zip(inputs, results, strict=True)):
        for _ in range(6):
            x = torch.sin(x) * 2
        assert torch.equal(result, torch.tanh(x) + 1)
        if step in saved:
            tanh = calls["inference", step, "aten.tanh.default"]
            assert torch.equal(tanh.load_args()[0][0], x)
            assert torch.equal(tanh.load_outputs(), torch.tanh(x))
