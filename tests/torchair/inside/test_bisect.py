"""What TorchAir has compiled is bisected as well: each piece is an output of its GE graph."""

from __future__ import annotations

import pytest
import torch

import torchair_scope
from tests.support.encoder import encoder
from tests.torchair.setups.ge_executor import _FxRun

pytestmark = pytest.mark.usefixtures("patched")


def run_of(model, device):
    def run(x):
        with torch.no_grad():
            model(x.to(device))

    return run


def test_without_a_fault_none_is_found(compile_with, compiler_config, device):
    model = compile_with(compiler_config(), encoder(2, 16).to(device))
    found = torchair_scope.bisect(run_of(model, device), [torch.randn(2, 4, 16)])
    assert (found.outcome, found.runs) == ("agrees", 1)


def test_a_fault_of_a_ge_graph_is_found(compile_with, compiler_config, device, monkeypatch):
    right = torch.fx.Interpreter.run_node

    def run_node(self, n):
        result = right(self, n)
        return result * 1.01 if isinstance(self, _FxRun) and n.name == "gelu_1" else result

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", run_node)
    model = compile_with(compiler_config(), encoder(2, 16).to(device))
    found = torchair_scope.bisect(run_of(model, device), [torch.randn(2, 4, 16)], pieces=16)
    assert found.outcome == "found"
    assert [node["name"] for node in found.operators] == ["gelu_1"]
