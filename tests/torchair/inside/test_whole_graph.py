"""TorchAir by itself compiles a whole graph in this set-up, and what it tells GE is recorded."""

from __future__ import annotations

import sys

import torch

from tests.torchair.inside.models import ScopedNet, assert_same


def compiled(torchair, net, config, **options):
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(net, backend=backend, fullgraph=True, **options)


def test_a_compiled_model_gives_the_results_of_eager(
    torchair, device, compiler_config, mode, dynamic
):
    net = ScopedNet(torchair).eval().to(device)
    run = compiled(torchair, net, compiler_config(mode), dynamic=dynamic)
    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        for value in (x, x, torch.randn(5, 4).to(device)):
            assert_same(run(value), net(value))


def test_training_makes_a_forward_and_a_backward_graph(torchair, device, compiler_config, recorder):
    net = ScopedNet(torchair).eval().to(device)
    compiled(torchair, net, compiler_config())(torch.randn(3, 4).to(device)).sum().backward()
    assert len(recorder.ge_graphs) == 2


def test_a_scope_puts_its_attribute_on_the_operators_inside_it_alone(
    torchair, device, compiler_config, recorder
):
    net = ScopedNet(torchair).eval().to(device)
    compiled(torchair, net, compiler_config())(torch.randn(3, 4).to(device))
    marked = recorder.ge_graphs[0].types_with_attribute("torchair_enable_data_dump")
    assert "Tanh" in marked
    assert "Relu" in recorder.ge_graphs[0].op_types()
    assert "Relu" not in marked


def test_the_npu_executor_is_chosen_wherever_torch_npu_is_imported(
    torchair, device, compiler_config, recorder
):
    net = ScopedNet(torchair).eval().to(device)
    compiled(torchair, net, compiler_config())(torch.randn(3, 4).to(device))
    cpu, npu = 0, 1
    expected = npu if "torch_npu" in sys.modules else cpu
    assert recorder.ge_graphs[0].executor_type == expected


def test_a_core_limit_holds_for_its_operators_and_changes_no_result(
    torchair, device, compiler_config, recorder, mode
):
    def model(x):
        with torchair.scope.limit_core_num(2, 4):
            y = torch.relu(x)
        return torch.tanh(y)

    run = compiled(torchair, model, compiler_config(mode))
    x = torch.randn(3, 4).to(device)
    assert_same(run(x), model(x))
    for graph in recorder.ge_graphs:
        limited = graph.types_with_attribute("_op_aicore_num")
        assert "Relu" in limited
        assert "Tanh" not in limited
