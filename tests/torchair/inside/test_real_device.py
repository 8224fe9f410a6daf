"""What only the real torch_npu has: backends by name, and operators with a device of their own."""

from __future__ import annotations

import pytest
import torch

from tests.torchair.inside.models import ScopedNet, assert_same

pytestmark = pytest.mark.only_in("C")


@pytest.mark.parametrize("backend", ["npu", "npugraph_ex"])
def test_a_backend_compiles_by_its_name(torchair, device, backend):
    net = ScopedNet(torchair).eval().to(device)
    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        assert_same(torch.compile(net, backend=backend, fullgraph=True)(x), net(x))


def test_a_ge_graph_may_hold_an_operator_that_draws_random_numbers(
    torchair, device, compiler_config, recorder
):
    def noisy(x):
        return torch.rand(3, 4, device=device) + x * 0

    backend = torchair.get_npu_backend(compiler_config=compiler_config())
    x = torch.randn(3, 4).to(device)
    assert torch.compile(noisy, backend=backend, fullgraph=True)(x).shape == x.shape
    assert len(recorder.ge_graphs) == 1
