"""The engine `tap`: the graph that TorchAir compiles stays one, and returns the scope's values."""

from __future__ import annotations

import pytest
import torch
import torchair

import torchair_scope
from tests.torchair.inside.models import assert_same

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]


def attention(x):
    y = torch.relu(x)
    with torchair.scope.data_dump("middle", engine="tap"):
        y = torch.tanh(y @ y.t())
        y = torch.softmax(y, -1)
    return torch.sigmoid(y) @ x


def attention_alone(x):
    y = torch.tanh(torch.relu(x) @ torch.relu(x).t())
    return torch.sigmoid(torch.softmax(y, -1)) @ x


def test_the_scope_is_compiled_with_the_rest_and_its_values_are_dumped(
    compile_with, dump_config, device, read_dump, mode, dynamic
):
    run = compile_with(dump_config(mode), attention, dynamic=dynamic)
    for _ in range(3):
        x = torch.randn(3, 4).to(device)
        assert_same(run(x), attention_alone(x))
        calls = read_dump().ranks[0].calls
        softmax = calls[-1]
        (scores, *_), _ = softmax.load_args()
        h = torch.relu(x.cpu())
        assert softmax.target == "aten._softmax.default"
        assert_same(scores, torch.tanh(h @ h.t()))
        assert_same(softmax.load_outputs(), torch.softmax(scores, -1))
    (rank,) = read_dump().ranks
    assert rank.problems == []
    assert [graph["regions"] for graph in rank.graphs] == [["compiled"]]
    targets = {call.target for call in rank.calls}
    assert "aten.tanh.default" in targets
    assert targets & {"aten.mm.default", "aten.matmul.default"}


def test_the_operators_of_the_scope_reach_ge(compile_with, dump_config, device, recorder):
    x = torch.randn(3, 4).to(device)
    assert_same(compile_with(dump_config(), attention)(x), attention_alone(x))
    (graph,) = recorder.ge_graphs
    assert {"Relu", "Tanh", "Sigmoid"} <= set(graph.op_types())


def test_both_directions_of_training_are_tapped(compile_with, dump_config, device, read_dump):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    compile_with(dump_config(), attention)(x).sum().backward()
    alone = x.detach().clone().requires_grad_()
    attention_alone(alone).sum().backward()
    assert_same(x.grad, alone.grad)
    (rank,) = read_dump().ranks
    directions = {graph["graph"]: graph["direction"] for graph in rank.graphs}
    targets = {(directions[call.graph], call.target) for call in rank.calls}
    assert ("backward", "aten.tanh_backward.default") in targets
    assert ("forward", "aten._softmax.default") in targets


def test_an_input_that_the_graph_overwrites_is_dumped_as_it_was(
    compile_with, dump_config, device, read_dump, mode
):
    def update(x, total):
        with torchair.scope.data_dump("sum", engine="tap"):
            y = torch.sin(x) * total
            total.add_(x)
        return y

    x, total = torch.randn(3).to(device), torch.ones(3).to(device)
    run = compile_with(dump_config(mode), update)
    for _ in range(2):
        before = total.cpu().clone()
        run(x, total)
        assert_same(total.cpu(), before + x.cpu())
        mul = [call for call in read_dump().ranks[0].calls if "mul" in call.target][-1]
        assert_same(mul.load_args()[0][1], before)


def test_steps_that_are_not_selected_run_a_graph_without_taps(
    compile_with, dump_config, device, recorder, read_dump
):
    run = compile_with(dump_config(), attention)
    with torchair_scope.scope.configure(steps="1|3"):
        for _ in range(4):
            x = torch.randn(3, 4).to(device)
            assert_same(run(x), attention_alone(x))
    assert {call.step for call in read_dump().ranks[0].calls} == {1, 3}
    assert sorted(len(graph.output_dtypes) for graph in recorder.ge_graphs) == [1, 5]


def test_a_rank_that_is_not_selected_compiles_no_taps(
    compile_with, dump_config, device, recorder, dump_path
):
    x = torch.randn(3, 4).to(device)
    with torchair_scope.scope.configure(ranks=1):
        assert_same(compile_with(dump_config(), attention)(x), attention_alone(x))
    (graph,) = recorder.ge_graphs
    assert len(graph.output_dtypes) == 1
    assert not dump_path.exists()


def test_directions_of_training_may_have_taps_or_not(
    compile_with, dump_config, device, read_dump, mode
):
    run = compile_with(dump_config(mode), attention)
    with torchair_scope.scope.configure(steps="1"):
        for number in range(4):
            x = torch.randn(3, 4, device=device, requires_grad=True)
            y = run(x)
            assert_same(y, attention_alone(x))
            if number:
                y.sum().backward()
                alone = x.detach().clone().requires_grad_()
                attention_alone(alone).sum().backward()
                assert_same(x.grad, alone.grad)
    (rank,) = read_dump().ranks
    directions = {graph["graph"]: graph["direction"] for graph in rank.graphs}
    assert {(directions[call.graph], call.step) for call in rank.calls} == {
        ("forward", 1),
        ("backward", 1),
    }
