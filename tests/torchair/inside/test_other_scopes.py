"""TorchAir's other scopes around, inside and across a dump scope."""

from __future__ import annotations

import sys

import pytest
import torch
import torchair
import torchair.npu_fx_compiler
from torchair.scope import _scope_attr

import torchair_scope
from tests.torchair.inside.models import ScopedNet, assert_same

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
]

SCOPES = {
    "limit_core_num": (lambda: torchair.scope.limit_core_num(2, 4), "_op_aicore_num"),
    "npu_stream_switch": (lambda: torchair.scope.npu_stream_switch("1"), "_user_stream_label"),
    "super_kernel": (lambda: torchair.scope.super_kernel("fused"), "_super_kernel_scope"),
    "op_never_timeout": (lambda: torchair.scope.op_never_timeout(True), "_op_exec_never_timeout"),
}
every_scope = pytest.mark.parametrize("name", SCOPES)


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The ATen graphs that TorchAir makes GE or ACL graphs of, markers included."""
    compiler = torchair.npu_fx_compiler._NpuFxCompiler
    own = compiler._gen_compiled_gm
    graphs = []

    def watch(self, gm, *args):
        graphs.append(gm.graph)
        return own(self, gm, *args)

    monkeypatch.setattr(compiler, "_gen_compiled_gm", watch)
    return graphs


def in_force(graph):
    """For each operator the keys of the scopes in force; fails if markers are not balanced."""
    stack, found = [], {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = node.target._schema.name if hasattr(node.target, "_schema") else str(node.target)
        if name.endswith("scope_enter"):
            stack.append(dict(zip(*node.args[:2], strict=True)))
        elif name.endswith("scope_exit"):
            stack.pop()
        else:
            found[name] = {key for attributes in stack for key in attributes}
    assert not stack
    return found


def markers(graph):
    """The graph's markers and operators in order, as "(", ")" and names."""
    names = (str(node.target).split(".") for node in graph.nodes if node.op == "call_function")
    brackets = {"scope_enter": "(", "scope_exit": ")"}
    return [brackets.get(name[1], name[1]) for name in names]


def assert_results_and_dump(run, function, device, read_dump, targets):
    x = torch.randn(3, 4).to(device)
    expected = function(x.cpu()) if device != "cpu" else function(x)
    with torch.no_grad():
        assert_same(run(x), expected)
    assert [call.target for call in read_dump().ranks[0].calls] == targets


def refuses_super_kernel(name, mode):
    return name == "super_kernel" and mode != "max-autotune"


@every_scope
def test_a_scope_around_a_dump_scope_is_in_force_on_both_sides_of_it(
    compile_with, dump_config, device, compiled_graphs, read_dump, recorder, name, mode
):
    make, key = SCOPES[name]

    def model(x):
        y = torch.exp(x)
        with make():
            y = torch.relu(y)
            with torchair.scope.data_dump("middle"):
                y = torch.tanh(y)
            y = torch.sigmoid(y)
        return torch.sin(y)

    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        run = compile_with(dump_config(mode), model)
        expected = torch.sin(torch.sigmoid(torch.tanh(torch.relu(torch.exp(x)))))
        assert_same(run(x), expected)
    first, second = map(in_force, compiled_graphs)
    assert key in first["aten::relu"]
    assert key in second["aten::sigmoid"]
    assert not first["aten::exp"]
    assert not second["aten::sin"]
    (call,) = read_dump().ranks[0].calls
    assert [key in scope for scope in call.record["scopes_not_in_force"]] == [True]
    if mode == "max-autotune":
        marked = [set(graph.types_with_attribute(key)) for graph in recorder.ge_graphs]
        assert [types & {"Exp", "Relu", "Sigmoid", "Sin"} for types in marked] == [
            {"Relu"},
            {"Sigmoid"},
        ]


@every_scope
def test_a_scope_within_a_dump_scope_is_dumped_with_it(
    compile_with, dump_config, device, compiled_graphs, read_dump, name, mode
):
    make, key = SCOPES[name]

    def model(x):
        y = torch.exp(x)
        with torchair.scope.data_dump("all"):
            y = torch.tanh(y)
            with make():
                y = torch.relu(y)
        return torch.sin(y)

    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        assert_same(
            compile_with(dump_config(mode), model)(x),
            torch.sin(torch.relu(torch.tanh(torch.exp(x)))),
        )
    for graph in compiled_graphs:
        assert not any(in_force(graph).values())
    tanh, relu = read_dump().ranks[0].calls
    assert "scopes_not_in_force" not in tanh.record
    assert [key in scope for scope in relu.record["scopes_not_in_force"]] == [True]


def test_nested_scopes_stay_nested_in_each_part(
    compile_with, dump_config, device, compiled_graphs, mode
):
    def model(x):
        with torchair.scope.limit_core_num(2, 4):
            y = torch.relu(x)
            with torchair.scope.op_never_timeout(True):
                y = torch.exp(y)
                with torchair.scope.data_dump():
                    y = torch.tanh(y)
                y = torch.sin(y)
            y = torch.cos(y)
        return torch.sigmoid(y)

    compile_with(dump_config(mode), model)(torch.randn(3, 4).to(device))
    assert [markers(graph) for graph in compiled_graphs] == [
        ["(", "relu", "(", "exp", ")", ")"],
        ["(", "(", "sin", ")", "cos", ")", "sigmoid"],
    ]


def test_operators_of_one_scope_share_a_pair_of_markers_and_equal_scopes_do_not(
    compile_with, dump_config, device, compiled_graphs, read_dump
):
    def model(x):
        with torchair.scope.super_kernel("fused"):
            y = torch.sin(torch.relu(x))
        with torchair.scope.super_kernel("fused"):
            y = torch.exp(y)
        with torchair.scope.data_dump():
            return torch.tanh(y)

    compile_with(dump_config(), model)(torch.randn(3, 4).to(device))
    assert [markers(graph) for graph in compiled_graphs] == [
        ["(", "relu", "sin", ")", "(", "exp", ")"]
    ]
    assert len(read_dump().ranks[0].calls) == 1


def test_a_core_limit_is_set_and_given_back_in_each_captured_graph(
    compile_with, dump_config, device, mode, monkeypatch
):
    if mode == "max-autotune":
        pytest.skip("captures nothing")

    def model(x):
        with torchair.scope.limit_core_num(2, 4):
            y = torch.relu(x)
            with torchair.scope.data_dump():
                y = torch.tanh(y)
            return torch.sigmoid(y)

    limits = limits_set(monkeypatch)
    x = torch.randn(3, 4).to(device)
    assert_same(compile_with(dump_config(mode), model)(x), torch.sigmoid(torch.tanh(torch.relu(x))))
    # The first of each three is TorchAir's own, with which it begins a capture.
    assert [limit == (2, 4) for limit in limits] == [False, True, False] * 2


def limits_set(monkeypatch):
    """The core limits that are set on streams from now on."""
    limits = []
    own = torch.npu.set_stream_limit

    def watch(stream, cube, vector):
        limits.append((cube, vector))

    watch.__module__, watch.__name__ = own.__module__, own.__name__
    watch.__qualname__ = own.__qualname__
    monkeypatch.setattr(torch.npu, "set_stream_limit", watch)
    return limits


def test_a_data_dump_taken_from_torchair_before_the_patch_works_through_its_markers(
    compile_with, dump_config, device, read_dump, recorder, mode
):
    torchair_scope.unpatch()
    net = ScopedNet(torchair).eval().to(device)
    torchair_scope.backends.patching.patch()
    assert net.scope is not torchair.scope.data_dump
    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        assert_same(compile_with(dump_config(mode), net)(x), net(x))
    (rank,) = read_dump().ranks
    assert {call.scope for call in rank.calls} == {"data_dump"}
    assert "aten.tanh.default" in {call.target for call in rank.calls}
    assert "aten.relu.default" not in {call.target for call in rank.calls}
    assert [graph["regions"] for graph in rank.graphs] == [["compiled", "dumped", "compiled"]]


@pytest.mark.parametrize("ours", [True, False])
def test_tags_reach_the_backward_graph_and_torchairs_markers_do_not(
    compile_with, dump_config, device, read_dump, ours
):
    if not ours:
        torchair_scope.unpatch()
    net = ScopedNet(torchair).to(device)
    torchair_scope.backends.patching.patch()
    compile_with(dump_config(), net)(torch.randn(3, 4).to(device)).sum().backward()
    (rank,) = read_dump().ranks
    dumped_backward = "aten.tanh_backward.default" in {call.target for call in rank.calls}
    assert dumped_backward == ours


def test_a_failed_conversion_leaves_no_scope_behind_and_its_part_runs_uncompiled(
    compile_with, dump_config, device, read_dump, recorder
):
    def model(x):
        with torchair.scope.op_never_timeout(True):
            y = torch.special.bessel_j0(x)
        with torchair.scope.data_dump():
            y = torch.tanh(y)
        return torch.relu(y)

    x = torch.randn(3, 4).to(device)
    run = compile_with(dump_config(), model)
    with pytest.warns(UserWarning, match="ge_converter is not implemented") as caught:
        result = run(x)
    assert "runs uncompiled, with the right results" in str(caught[0].message)
    assert_same(result, torch.relu(torch.tanh(torch.special.bessel_j0(x.cpu()))))
    assert _scope_attr.local.scope_attr.scope_attr_info() == []
    assert [call.target for call in read_dump().ranks[0].calls] == ["aten.tanh.default"]
    (graph,) = recorder.ge_graphs
    assert "Relu" in graph.op_types()
    assert not graph.types_with_attribute("_op_exec_never_timeout")


def test_a_scope_that_is_open_while_a_conversion_fails_stays_open(
    compile_with, dump_config, device
):
    def model(x):
        with torchair.scope.data_dump():
            y = torch.tanh(x)
        with torchair.scope.op_never_timeout(True):
            return torch.special.bessel_j0(y)

    _scope_attr.scope_enter(["mine"], ["1"])
    with pytest.warns(UserWarning, match="runs uncompiled"):
        compile_with(dump_config(), model)(torch.randn(3, 4).to(device))
    assert _scope_attr.local.scope_attr.scope_attr_info() == [{"mine": "1"}]


def refusal_of(run, x):
    with pytest.raises(Exception, match="a dump scope cuts the graph between") as raised:
        run(x)
    return str(raised.value)


def test_a_record_cut_from_its_wait_is_refused_with_the_way_out(compile_with, dump_config, device):
    def model(x):
        y = torch.relu(x)
        with torchair.scope.npu_stream_switch("1"):
            z = torch.exp(y)
            recorded = torchair.ops.record()
        with torchair.scope.data_dump():
            z = torch.tanh(z)
        torchair.ops.wait([recorded, z])
        return torch.sin(z) + y

    text = refusal_of(compile_with(dump_config(), model), torch.randn(3, 4).to(device))
    assert "between record and wait" in text
    assert "Open the scope around both of them" in text


def test_a_record_and_its_wait_on_one_side_of_a_dump_scope_are_compiled(
    compile_with, dump_config, device, read_dump
):
    def model(x):
        y = torch.relu(x)
        recorded = torchair.ops.record()
        with torchair.scope.npu_stream_switch("1"):
            torchair.ops.wait([recorded])
            z = torch.exp(y)
        with torchair.scope.data_dump():
            z = torch.tanh(z)
        return torch.sin(z)

    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        result = compile_with(dump_config(), model)(x)
    assert_same(result, torch.sin(torch.tanh(torch.exp(torch.relu(x)))))
    assert len(read_dump().ranks[0].calls) == 1


def test_tagged_events_cut_apart_are_refused(compile_with, dump_config, device, mode):
    if mode == "max-autotune":
        pytest.skip("has no tagged events")
    event = torchair.ops.npu_create_tagged_event(f"cut apart {mode}")

    def model(x):
        y = torch.relu(x)
        torchair.ops.npu_tagged_event_record(event)
        with torchair.scope.data_dump():
            y = torch.tanh(y)
        torchair.ops.npu_tagged_event_wait(event)
        return torch.sin(y)

    text = refusal_of(compile_with(dump_config(mode), model), torch.randn(3, 4).to(device))
    assert "between tagged_event_record and tagged_event_wait" in text


def test_an_event_stays_behind_what_it_was_recorded_after(
    compile_with, dump_config, device, compiled_graphs, mode
):
    if mode == "max-autotune":
        pytest.skip("has no tagged events")
    event = torchair.ops.npu_create_tagged_event(f"kept in place {mode}")

    def model(x):
        with torchair.scope.data_dump():
            y = torch.tanh(x)
        z = torch.exp(y)
        torchair.ops.npu_tagged_event_record(event)
        with torchair.scope.npu_stream_switch("1"):
            torchair.ops.npu_tagged_event_wait(event)
            w = torch.sin(z)
        return w

    x = torch.randn(3, 4).to(device)
    assert_same(compile_with(dump_config(mode), model)(x), torch.sin(torch.exp(torch.tanh(x))))
    assert [markers(graph) for graph in compiled_graphs] == [
        ["exp", "tagged_event_record", "(", "tagged_event_wait", "sin", ")"]
    ]


@pytest.mark.only_in("C")
def test_a_super_kernel_cut_apart_is_refused(compile_with, dump_config, device):
    def model(x):
        y = torch.relu(x)
        torch.ops.npu.super_kernel_scope_begin("fused")
        y = torch.exp(y)
        with torchair.scope.data_dump():
            y = torch.tanh(y)
        y = torch.sin(y)
        torch.ops.npu.super_kernel_scope_end("fused")
        return y

    run = compile_with(dump_config("npugraph_ex"), model)
    text = refusal_of(run, torch.randn(3, 4).to(device))
    assert "between super_kernel_scope_begin and super_kernel_scope_end" in text


def test_markers_that_are_not_balanced_get_torchairs_own_error(compile_with, dump_config, device):
    def model(x):
        with torchair.scope.data_dump():
            y = torch.tanh(x)
        torch.ops.air.scope_enter(["_op_aicore_num"], ["2"])
        return torch.relu(y)

    with pytest.raises(Exception, match="scope_enter"):
        compile_with(dump_config(), model)(torch.randn(3, 4).to(device))


def test_a_scope_in_the_middle_of_streams_gives_the_results_of_one_stream(
    compile_with, dump_config, device, read_dump, mode
):
    if "torch_npu" not in sys.modules:
        pytest.skip("has no streams")

    def model(x):
        y = torch.relu(x)
        with torchair.scope.npu_stream_switch("1"):
            z = torch.exp(y)
            with torchair.scope.data_dump():
                z = torch.tanh(z)
            z = z + 1
        return torch.sin(y) + z

    run = compile_with(dump_config(mode), model, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 4).to(device)
        y = torch.relu(x)
        assert_same(run(x), torch.sin(y) + torch.tanh(torch.exp(y)) + 1)
    assert [call.step for call in read_dump().ranks[0].calls] == [0, 1]
