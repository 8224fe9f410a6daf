"""Runs with a planted fault: an operator made faulty in a scope, or in a compiled region."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair_scope
from torchair_scope.capture.interpreter import DumpingInterpreter

SIZE = 16
STEPS = 2
Fault = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], random.Random], Any]


class Block(torch.nn.Module):
    """Attention and elementwise operators, with square matrices so that operands can be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(SIZE, SIZE)
        self.norm = torch.nn.LayerNorm(SIZE)
        self.query = torch.nn.Linear(SIZE, SIZE)
        self.after = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(self.before(x)) + x
        with torchair_scope.scope.data_dump("block"):
            q = self.query(self.norm(h))
            mixed = torch.softmax(q @ h, dim=-1) @ q
            gated = (mixed - h.tanh()) / (1.5 + torch.sigmoid(h))
            y = torch.nn.functional.gelu(gated) * h
        return self.after(y).tanh()


def run(path: Path, dtype: torch.dtype, backend: Any, directions: str = "both") -> None:
    """Dump two steps of the block, forward and backward, each with other inputs.

    The backend "eager" is no compiler at all.
    """
    torch._dynamo.reset()
    torch.manual_seed(11)
    model = Block().to(dtype)
    options = {"path": str(path), "backend": backend}
    if backend != "eager":
        model = torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)
    with torchair_scope.scope.configure(path=str(path)):
        for _ in range(STEPS):
            x = torch.randn(SIZE, SIZE, dtype=dtype)
            model(x).square().sum().backward()


@contextlib.contextmanager
def faulty_operator(node: str, fault: Fault, seed: int) -> Iterator[None]:
    """While open, the dumped node of this name computes what the fault makes of it."""
    right = torch.fx.Interpreter.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(self, DumpingInterpreter) or self.node.name != node:
            return right(self, target, args, kwargs)

        def operator(*args: Any, **kwargs: Any) -> Any:
            return right(self, target, args, kwargs)

        return fault(operator, args, kwargs, random.Random(seed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.Interpreter, "call_function", call_function)
        yield


def changing_one_output(
    change: Callable[[torch.Tensor, random.Random], torch.Tensor],
) -> Fault:
    """A fault in the first output of an operator."""

    def fault(operator: Any, args: Any, kwargs: Any, chance: random.Random) -> Any:
        result = operator(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return change(result, chance)
        return type(result)([change(result[0], chance), *result[1:]])

    return fault


def perturbed(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """One element is off by a quarter of the largest value."""
    changed = value.clone()
    position = [chance.randrange(size) for size in value.shape]
    changed[tuple(position)] += 0.25 * value.abs().max()
    return changed


def rounded(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """All elements were in a narrower dtype for a moment."""
    narrow = torch.bfloat16 if value.dtype is torch.float32 else torch.float8_e5m2
    return value.to(narrow).to(value.dtype)


def with_nan(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """One element is NaN."""
    changed = value.clone()
    changed[tuple(chance.randrange(size) for size in value.shape)] = torch.nan
    return changed


def swapped(operator: Any, args: Any, kwargs: Any, chance: random.Random) -> Any:
    """The first two operands change places."""
    first, second, *others = args
    return operator(second, first, *others, **kwargs)


def stale() -> Fault:
    """The result is that of the step before."""
    last: list[Any] = []

    def fault(operator: Any, args: Any, kwargs: Any, chance: random.Random) -> Any:
        last.append(operator(*args, **kwargs))
        return last[-2] if len(last) > 1 else last[-1]

    return fault


def faulty_compiler(seed: int, piece: int) -> Callable[..., Any]:
    """An inner compiler, which makes one operator of the given compiled region faulty."""
    pieces: list[torch.fx.GraphModule] = []

    def compile_with_fault(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        pieces.append(gm)
        if len(pieces) - 1 != piece:
            return gm.forward
        chance = random.Random(seed)
        candidates = [
            node
            for node in gm.graph.nodes
            if node.op == "call_function" and not getattr(node.target, "is_view", False)
        ]
        faulty = chance.choice(candidates)

        class Faulty(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                if n is not faulty:
                    return result
                assert isinstance(result, torch.Tensor)
                return result * 1.25 + 0.25 * result.abs().max()

        return lambda *args: Faulty(gm).run(*args)

    return compile_with_fault
