"""A scope around a call that another backend has compiled: the call is dumped, as eager code."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func

import torchair_scope as torchair
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import read


@pytest.fixture(autouse=True)
def _dump_here(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    torch._dynamo.utils.counters.clear()


def calls(path):
    if not path.exists():
        return []
    (rank,) = read(path).ranks
    assert rank.problems == []
    return rank.calls


def nodes(path):
    return [call.node for call in calls(path)]


def shift(x):
    return (x.sin() + 1).cos()


def number_of_compiles():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def unknown(gm, example_inputs):
    return gm.forward


HOW = [
    {"backend": "inductor"},
    {"backend": "inductor", "mode": "reduce-overhead"},
    {"backend": "aot_eager"},
    {"backend": unknown},
]


@pytest.mark.parametrize("how", HOW, ids=["inductor", "options", "aot_eager", "callable"])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("first_call_in_scope", [True, False])
def test_a_call_in_a_scope_is_dumped_whoever_compiles_it(
    dump_path, how, fullgraph, first_call_in_scope
):
    function = torch.compile(shift, fullgraph=fullgraph, **how)
    x = torch.ones(3)
    if not first_call_in_scope:
        function(x)
    compiles = number_of_compiles()
    with data_dump("step"):
        result = function(x)
    assert torch.equal(result, shift(x))
    assert nodes(dump_path) == ["sin", "add", "cos"]
    assert number_of_compiles() == compiles
    torch.testing.assert_close(function(x), result)
    assert nodes(dump_path) == ["sin", "add", "cos"]
    assert number_of_compiles() == 1
    assert_replays(read(dump_path))


def test_forward_and_backward_are_dumped_with_lines_and_modules(dump_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    x = torch.randn(3, 4)
    gradients = []
    for run in (model, torch.compile(model, backend="inductor")):
        model.zero_grad()
        with data_dump("step", path=dump_path / str(len(gradients))):
            loss = run(x).square().sum()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert difference(*gradients) is None
    golden, dumped = (calls(dump_path / name) for name in ("0", "1"))
    assert [call.target for call in dumped] == [call.target for call in golden]
    assert "aten.gelu_backward.default" in [call.target for call in dumped]
    modules = {call.record["module"] for call in dumped}
    assert modules >= {"0", "1"}


def test_a_module_compiled_in_place_and_the_scopes_in_it_are_dumped(dump_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            with data_dump("inner"):
                x = x.sin()
            torch._dynamo.graph_break()
            return x + 1

    model = Model()
    model.compile(backend="inductor")
    x = torch.ones(3)
    with data_dump("outer"):
        model(x)
    assert [(call.node, call.scope) for call in calls(dump_path)] == [
        ("sin", "outer/inner"),
        ("add", "outer"),
    ]


def test_other_threads_go_on_with_compiled_code(dump_path):
    ran_uncompiled = []

    def function(x):
        if not torch.compiler.is_compiling():
            ran_uncompiled.append(threading.current_thread().name)
        return x.sin()

    compiled = torch.compile(function, backend="inductor")
    compiled(torch.ones(3))
    assert ran_uncompiled == []
    with data_dump("mine"):
        thread = threading.Thread(target=compiled, args=(torch.ones(3),), name="other")
        thread.start()
        thread.join()
        compiled(torch.ones(3))
    assert ran_uncompiled == [threading.main_thread().name]
    assert nodes(dump_path) == ["ones", "ones_1", "sin"]


def test_scopes_that_are_switched_off_leave_the_call_to_its_compiler(dump_path):
    ran_uncompiled = []

    def function(x):
        if not torch.compiler.is_compiling():
            ran_uncompiled.append(True)
        return x.sin()

    compiled = torch.compile(function, backend="inductor")
    with data_dump("mine"), torchair.scope.disabled():
        compiled(torch.ones(3))
    assert ran_uncompiled == []
    assert calls(dump_path) == []


def test_a_graph_break_in_own_code_is_still_said_in_a_scope_around_both(dump_path):
    def breaks(x):
        with data_dump("inner"):
            x = x.sin()
            torch._dynamo.graph_break()
            return x + 1

    options = {"path": str(dump_path), "backend": "aot_eager"}
    own = torch.compile(breaks, backend="torchair_scope", options=options)
    other = torch.compile(breaks, backend="inductor")
    for backend, function in (("other", other), ("own", own), ("other", other)):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, data_dump(backend):
            warnings.simplefilter("always")
            function(torch.ones(3))
        said = [str(warning.message) for warning in caught]
        assert any("graph break" in text for text in said) == (backend == "own")


def test_torch_is_as_it_was_until_a_scope_is_opened_outside_of_compiled_code():
    program = (
        "import torch, torchair_scope, torch._dynamo.eval_frame as frames\n"
        "own = frames._callback_from_stance\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
        "assert frames._callback_from_stance is own\n"
        "with torchair_scope.scope.data_dump(): pass\n"
        "assert frames._callback_from_stance is not own\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_graph_from_get_compiler_is_dumped_forward_and_backward(dump_path):
    compiler = torchair.get_compiler(torchair.CompilerConfig())
    boxed = lambda *graph: make_boxed_func(compiler(*graph))  # noqa: E731
    function = aot_function(shift, fw_compiler=boxed, bw_compiler=boxed)
    x = torch.ones(3, requires_grad=True)
    function(x).sum().backward()
    assert calls(dump_path) == []
    expected, x.grad = x.grad, None
    with data_dump("step"):
        result = function(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, expected)
    targets = [call.target for call in calls(dump_path)]
    assert targets[:3] == ["aten.sin.default", "aten.add.Tensor", "aten.cos.default"]
    assert "aten.neg.default" in targets[3:]
    assert_replays(read(dump_path))


def test_after_a_graph_break_the_functions_that_the_scope_calls_are_dumped_and_others_compiled(
    dump_path,
):
    ran_uncompiled = []

    def helper(x, place):
        if not torch.compiler.is_compiling():
            ran_uncompiled.append(place)
        return x.sin() * 2

    def breaks(x):
        x = helper(x, "before")
        with data_dump("mine"):
            x = helper(x, "in")
            torch._dynamo.graph_break()
            x = x + 1
        return helper(x, "after")

    x = torch.ones(3)
    compiled = torch.compile(breaks, backend="inductor")
    with pytest.warns(torchair.store.run.DumpWarning, match="graph break"):
        result = compiled(x)
    torch.testing.assert_close(compiled(x), result)
    assert ran_uncompiled == ["in", "in"]
    assert nodes(dump_path) == ["sin", "mul", "add"] * 2
    after = torch.compile(helper, backend="inductor")
    after(x, "later")
    assert ran_uncompiled == ["in", "in"]
