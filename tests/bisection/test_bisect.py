"""A fault in compiled code is narrowed down to its operator; where none is, none is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchair_scope as torchair
from tests.bisection import faults
from tests.bisection.faults import FaultyCompiler
from tests.support.encoder import encoder

LAYERS, WIDTH, LENGTH = 24, 16, 16


def compiled(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend="torchair_scope", options={"backend": backend})


def infer(model: Any, steps: int = 1) -> Any:
    def run(*inputs: torch.Tensor) -> None:
        with torch.no_grad():
            for step in range(steps):
                model(*(value.roll(step, -1) for value in inputs))

    return run


def train(model: Any) -> Any:
    return lambda *inputs: model(*inputs).square().mean().backward()


FORWARD: dict[str, tuple[str, int, Any, str]] = {
    "wrong kernel": ("aten.gelu.default", 17, faults.scaled, "0"),
    "dropped cast": ("aten.addmm.default", 9, faults.narrow, "0"),
    "NaN": ("aten.bmm.default", 30, faults.one_nan, "0"),
    "wrong epsilon": ("aten.native_layer_norm.default", 5, faults.other_epsilon, "0"),
    "off by one": ("aten._softmax.default", 23, faults.off_by_one, "0"),
    "swapped operands": ("aten.bmm.default", 0, faults.swapped, "0"),
    "dropped term": ("aten.add.Tensor", 47, faults.dropped, "0"),
    "stale buffer": ("aten.div.Tensor", 11, "stale", "1"),
}
BACKWARD: dict[str, tuple[str, int, Any]] = {
    "wrong kernel": ("aten.gelu_backward.default", 12, faults.scaled),
    "off by one": ("aten._softmax_backward_data.default", 20, faults.off_by_one),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORWARD)
def test_a_fault_in_the_forward_of_24_layers_is_found_in_at_most_12_runs(kind: str) -> None:
    target, nth, fault, step = FORWARD[kind]
    compiler = FaultyCompiler(target, nth, faults.stale() if fault == "stale" else fault)
    model = compiled(encoder(LAYERS, WIDTH), compiler)
    steps = int(step) + 1
    found = torchair.bisect(
        infer(model, steps), [torch.randn(2, LENGTH, WIDTH)], steps=step, pieces=8
    )
    assert found.outcome == "found"
    assert {node["name"] for node in found.operators} == compiler.planted
    assert found.operators[0]["target"] == target
    assert found.runs <= 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKWARD)
def test_a_fault_in_the_backward_of_24_layers_is_found_in_at_most_12_runs(kind: str) -> None:
    target, nth, fault = BACKWARD[kind]
    compiler = FaultyCompiler(target, nth, fault, in_backward=True)
    model = compiled(encoder(LAYERS, WIDTH), compiler)
    found = torchair.bisect(train(model), [torch.randn(2, LENGTH, WIDTH)], pieces=16)
    assert found.outcome == "found"
    assert {node["name"] for node in found.operators} == compiler.planted
    assert found.decisive is not None
    assert found.decisive.direction == "backward"
    assert found.runs <= 12


class Restless(torch.nn.Module):
    """Draws random numbers, writes to its buffers, and returns a view of what it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(self.norm(x), 0.4)
        before = self.seen[1:].sum()
        self.seen.mul_(0.5).add_(h.detach())
        return torch.relu(self.linear(h)) + before + self.seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_fault_none_is_found(backend: str, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(Restless(), *encoder(2, 8)).to(dtype)
    found = torchair.bisect(train(compiled(model, backend)), [torch.randn(4, 8, dtype=dtype)])
    assert found.outcome == "agrees"
    assert found.decisive is None
    assert found.runs == 1


def test_random_operators_and_written_buffers_are_no_fault_of_the_pieces(tmp_path: Path) -> None:
    compiler = FaultyCompiler("aten.relu.default", 0, faults.scaled)
    found = torchair.bisect(train(compiled(Restless(), compiler)), [torch.randn(4, 8)])
    assert found.outcome == "found"
    assert {node["name"] for node in found.operators} == compiler.planted


def test_a_dynamic_size_is_no_obstacle() -> None:
    compiler = FaultyCompiler("aten.gelu.default", 1, faults.scaled)
    model = torch.compile(
        encoder(2, 8), backend="torchair_scope", options={"backend": compiler}, dynamic=True
    )
    found = torchair.bisect(infer(model), [torch.randn(2, 5, 8)], pieces=16)
    assert found.outcome == "found"
    assert {node["name"] for node in found.operators} == compiler.planted


def test_the_models_scopes_dump_nothing_meanwhile(dump_path: Path) -> None:
    def shift(x: torch.Tensor) -> torch.Tensor:
        with torchair.scope.data_dump("shift"):
            return x.sin() + 1

    options = {"backend": "aot_eager", "path": str(dump_path)}
    model = torch.compile(shift, backend="torchair_scope", options=options)
    assert torchair.bisect(model, [torch.ones(3)]).outcome == "agrees"
    assert not dump_path.exists()
    model(torch.ones(3))
    assert dump_path.exists()


def test_a_model_that_another_backend_compiles_is_an_error_that_says_what_to_do() -> None:
    model = torch.compile(torch.sin, backend="eager")
    with pytest.raises(RuntimeError, match="backend='torchair_scope'"):
        torchair.bisect(model, [torch.ones(3)])


def test_fewer_than_two_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="pieces is 1; it can be 2 or more"):
        torchair.bisect(torch.sin, [torch.ones(3)], pieces=1)


def test_a_folder_of_another_bisection_is_refused(tmp_path: Path) -> None:
    model = compiled(torch.nn.Linear(2, 2), "aot_eager")
    torchair.bisect(model, [torch.ones(2)], folder=tmp_path)
    with pytest.raises(ValueError, match="is the folder of another bisection"):
        torchair.bisect(model, [torch.ones(2)], folder=tmp_path, steps="3")
