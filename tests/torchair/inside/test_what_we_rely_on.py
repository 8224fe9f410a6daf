"""Facts about TorchAir that cutting its graphs rests on; a new TorchAir may change them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate


@pytest.fixture
def aten_graphs(monkeypatch):
    """The ATen graphs, each with its example inputs, as they reach TorchAir's compiler."""
    from torchair.npu_fx_compiler import _NpuFxCompiler

    graphs = []
    compile_graph = _NpuFxCompiler._get_compiled_gm

    def watch(self, gm, example_inputs):
        graphs.append((gm, example_inputs))
        return compile_graph(self, gm, example_inputs)

    monkeypatch.setattr(_NpuFxCompiler, "_get_compiled_gm", watch)
    return graphs


def annotated_nodes(gm):
    return {
        node.name
        for node in gm.graph.nodes
        if node.op == "call_function" and "mine" in (node.meta.get("custom") or {})
    }


def test_an_annotation_reaches_the_forward_and_the_backward_graph(
    torchair, device, compiler_config, aten_graphs, mode
):
    def model(x):
        y = torch.relu(x)
        with annotate({"mine": "yes"}):
            y = torch.tanh(y)
        return (y * 2).sum()

    backend = torchair.get_npu_backend(compiler_config=compiler_config(mode))
    x = torch.randn(3, 4).to(device).requires_grad_()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    (forward, _), (backward, _) = aten_graphs
    assert "tanh" in annotated_nodes(forward)
    assert "relu" not in annotated_nodes(forward)
    assert "tanh_backward" in annotated_nodes(backward)
    assert "threshold_backward" not in annotated_nodes(backward)


def test_parameters_are_marked_on_the_example_inputs_and_not_in_the_metadata(
    torchair, device, compiler_config, aten_graphs
):
    layer = torch.nn.Linear(4, 4).to(device)
    backend = torchair.get_npu_backend(compiler_config=compiler_config())
    with torch.no_grad():
        torch.compile(layer, backend=backend)(torch.randn(3, 4).to(device))
    ((gm, example_inputs),) = aten_graphs
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    mark = "_dynamo_static_input_type"
    assert sum(hasattr(value, mark) for value in example_inputs) == 2
    assert not any(hasattr(node.meta["val"], mark) for node in placeholders)


def test_the_markers_of_a_scope_are_an_empty_pair_in_the_backward_graph(
    torchair, device, compiler_config, aten_graphs
):
    def model(x):
        with torchair.scope.data_dump():
            return torch.tanh(x).sum()

    backend = torchair.get_npu_backend(compiler_config=compiler_config())
    x = torch.randn(3, 4).to(device).requires_grad_()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    backward, _ = aten_graphs[1]
    calls = [str(node.target) for node in backward.graph.nodes if node.op == "call_function"]
    assert calls[:2] == ["air.scope_enter.default", "air.scope_exit.default"]
    assert "aten.tanh_backward.default" in calls[2:]


def test_a_failed_conversion_leaves_its_scope_open(torchair, device, compiler_config):
    from torchair.scope import _scope_attr

    def model(x):
        with torchair.scope.op_never_timeout(True):
            return torch.special.bessel_j0(x)

    backend = torchair.get_npu_backend(compiler_config=compiler_config())
    with pytest.raises(Exception, match="ge_converter is not implemented"), torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(3).to(device))
    assert _scope_attr.local.scope_attr.scope_attr_info() == [{"_op_exec_never_timeout": "True"}]


def compiled_alone(torchair, config, function, x):
    gm = make_fx(function, tracing_mode="fake")(x)
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return torchair.get_compiler(config)(gm, inputs)


def test_an_acl_graph_writes_its_outputs_into_the_same_memory_at_each_run(
    torchair, device, compiler_config, mode, recorder
):
    x, later = torch.randn(3, 4).to(device), torch.randn(3, 4).to(device)
    run = compiled_alone(torchair, compiler_config(mode), lambda x: (torch.relu(x) + 1,), x)
    (first,), (second,) = run(x), run(later)
    assert (first.data_ptr() == second.data_ptr()) == (mode != "max-autotune")
    assert (recorder.replays == 2) == (mode != "max-autotune")


def test_an_acl_graph_that_returns_its_input_overwrites_the_first_one(
    torchair, device, compiler_config, mode
):
    x, later = torch.randn(3, 4).to(device), torch.randn(3, 4).to(device)
    before = x.cpu().clone()
    run = compiled_alone(torchair, compiler_config(mode), lambda x: (x, torch.relu(x)), x)
    run(x)
    run(later)
    assert torch.equal(x.cpu(), before) == (mode == "max-autotune")
