"""A scope around a call of compiled code: that call is dumped, others are what they were."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.replay import assert_replays
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import read

INNER = ["aot_eager", "inductor"]
every_inner = pytest.mark.parametrize("inner", INNER)


def compiled(function, path, inner="aot_eager", **how):
    options = {"path": str(path), "backend": inner}
    return torch.compile(function, backend="torchair_scope", options=options, fullgraph=True, **how)


def calls(path):
    (rank,) = read(path).ranks
    assert rank.problems == []
    return rank.calls


def nodes(path):
    return [call.node for call in calls(path)]


def number_of_compiles():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh_counters():
    torch._dynamo.utils.counters.clear()


def shift(x):
    return (x.sin() + 1).cos()


@every_inner
@pytest.mark.parametrize("first_call_in_scope", [True, False])
def test_a_call_in_a_scope_is_dumped_without_a_recompile_and_no_other(
    dump_path, inner, first_call_in_scope
):
    function, x = compiled(shift, dump_path, inner), torch.ones(3)
    if not first_call_in_scope:
        function(x)
        assert not dump_path.exists()

    def in_scope():
        with data_dump("step"):
            return function(x)

    result = in_scope()
    assert torch.equal(result, shift(x))
    torch.testing.assert_close(function(x), result)
    assert nodes(dump_path) == ["sin", "add", "cos"]
    assert {call.scope for call in calls(dump_path)} == {"step"}
    assert number_of_compiles() == 1
    in_scope()
    assert [call.step for call in calls(dump_path)] == [0] * 3 + [1] * 3
    assert number_of_compiles() == 1
    assert_replays(read(dump_path))


@every_inner
def test_forward_and_backward_of_such_a_call_are_dumped(dump_path, inner):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    x = torch.randn(3, 4)
    function = compiled(model, dump_path, inner)

    def gradients():
        model.zero_grad()
        function(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with data_dump():
        loss = function(x)
    model.zero_grad()
    loss.square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    torch.testing.assert_close(gradients(), expected)
    targets = [call.target for call in calls(dump_path)]
    assert targets.count("aten.gelu.default") == targets.count("aten.gelu_backward.default") == 1
    assert targets.count("aten.addmm.default") == 1
    assert_replays(read(dump_path))


def test_each_call_has_its_line_and_module_and_the_scope_that_is_within(dump_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x):
            with data_dump("inner"):
                x = self.linear(x)
            return x.sin()

    with torch.no_grad():
        function, x = compiled(Model(), dump_path), torch.ones(1, 2)
        with data_dump("outer"):
            function(x)
        assert [(call.node, call.scope) for call in calls(dump_path)] == [
            ("t", "outer/inner"),
            ("addmm", "outer/inner"),
            ("sin", "outer"),
        ]
        record = calls(dump_path)[1].record
        assert (record["module"], record["source"]["code"]) == ("linear", "x = self.linear(x)")
        function(x)
    assert {call.scope for call in calls(dump_path) if call.kind == "graph"} == {"inner"}


def test_it_is_what_a_golden_run_of_the_same_script_dumps(dump_path, tmp_path, monkeypatch):
    def script(function):
        x = torch.ones(3, requires_grad=True)
        with data_dump("script"):
            y = function(x).exp()
        y.sum().backward()

    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    script(torch.compile(shift, backend="torchair_scope", options={"backend": "aot_eager"}))
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(tmp_path / "golden"))
    script(shift)
    run, golden = calls(dump_path), calls(tmp_path / "golden")
    assert [(c.node, c.target, c.scope) for c in run] == [
        (c.node, c.target, c.scope) for c in golden
    ]


def test_dynamic_sizes_are_those_of_the_call(dump_path):
    function = compiled(lambda x: x.reshape(-1) + x.shape[0], dump_path, dynamic=True)
    function(torch.ones(2, 3))
    for size in (4, 5):
        with data_dump():
            result = function(torch.ones(size, 3))
        assert result.tolist() == [1 + size] * 3 * size
    assert number_of_compiles() == 1
    assert nodes(dump_path) == ["view", "add"] * 2


@every_inner
def test_a_graph_that_writes_to_its_input_and_to_a_buffer_does_so_once(dump_path, inner):
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(1)
            x.mul_(2)
            return x + self.count

    model, x = Counter(), torch.ones(2)
    function = compiled(model, dump_path, inner)
    with data_dump():
        result = function(x)
    assert (x.tolist(), model.count.item(), result.tolist()) == ([2, 2], 1, [3, 3])
    function(x)
    assert (x.tolist(), model.count.item()) == ([4, 4], 2)


def test_threads_take_the_way_of_their_own_scopes(dump_path):
    function, x = compiled(shift, dump_path), torch.ones(3)
    function(x)

    def run(index):
        if index % 2:
            return function(x)
        with data_dump(f"thread{index}"):
            return function(x)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert all(torch.equal(result, shift(x)) for result in results)
    scopes = [call.scope for call in calls(dump_path)]
    assert sorted(scopes) == sorted([f"thread{index}" for index in (0, 2, 4, 6)] * 3)


def test_a_filter_narrows_such_a_call(dump_path):
    options = {
        "path": str(dump_path),
        "backend": "aot_eager",
        "filter": lambda node: node if node.name == "add" else None,
    }
    function = torch.compile(shift, backend="torchair_scope", options=options)
    with data_dump():
        assert torch.equal(function(torch.ones(2)), shift(torch.ones(2)))
    assert nodes(dump_path) == ["add"]


def test_an_exception_in_such_a_call_is_the_users_own(dump_path):
    def function(x, index):
        return x.index_select(0, index)

    run = compiled(function, dump_path)
    run(torch.ones(3), torch.tensor([0]))
    with pytest.raises(IndexError) as eager:
        function(torch.ones(3), torch.tensor([7]))
    with pytest.raises(IndexError) as raised, data_dump():
        run(torch.ones(3), torch.tensor([7]))
    assert str(raised.value) == str(eager.value)
