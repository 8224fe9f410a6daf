"""A dump made through TorchAir is compared with an eager golden run, and each call replayed."""

from __future__ import annotations

import copy

import pytest
import torch
import torchair

import torchair_scope
from tests.support.encoder import encoder

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]
STEPS = 2
# An eager run takes a matmul apart, which for an NPU stays one operator; and it detaches.
ONLY_EAGER = {
    *("aten.view.default", "aten.expand.default", "aten.bmm.default"),
    *("aten._unsafe_view.default", "aten.detach.default"),
}


def train(run, device, dtype):
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(2, 5, 16, generator=generator).to(dtype).to(device)
        run(x).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_fault_no_operator_is_named(
    compile_with, dump_config, device, dump_path, tmp_path, dtype
):
    compiled = encoder(3, 16).to(dtype).to(device)
    golden = copy.deepcopy(compiled)
    torchair.scope.dump_ops(compiled[1], name="layer")
    torchair.scope.dump_ops(golden[1], name="layer", path=str(tmp_path / "golden"))
    train(golden, device, dtype)
    train(compile_with(dump_config(), compiled), device, dtype)

    comparison = torchair_scope.compare(tmp_path / "golden", dump_path)
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    pairs = [result.pair for result in comparison.results]
    assert {pair.target.graph.direction for pair in pairs} == {"forward", "backward"}
    assert {call.target for call in comparison.only_golden} <= ONLY_EAGER

    replays = torchair_scope.replay(dump_path)
    assert {each.verdict for each in replays} <= {"rounding", "cannot"}
    assert all(each.reason for each in replays)
