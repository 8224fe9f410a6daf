"""Faults of a compiler inside a scope: an operator of the compiled code that is wrong."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchair_scope
from torchair_scope.capture.compiler import direction_of
from torchair_scope.capture.tags import scope_of

SIZE = 16
STEPS = 2
aten = torch.ops.aten

Fault = Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any]], Any]


class Block(torch.nn.Module):
    """Masked attention between norms, with a part that is computed in float32 in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(SIZE, SIZE)
        self.norm = torch.nn.LayerNorm(SIZE)
        self.query = torch.nn.Linear(SIZE, SIZE)
        self.after = torch.nn.Linear(SIZE, SIZE)
        self.register_buffer("mask", torch.ones(SIZE, SIZE, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(self.before(x)) + x
        with torchair_scope.scope.data_dump("block"):
            q = self.query(self.norm(h))
            scores = torch.where(self.mask, (q @ h).float(), -1e4)
            mixed = torch.softmax(scores, dim=-1) @ q.float()
            scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5)
            gated = (mixed * scale).to(x.dtype) / (1.5 + torch.sigmoid(h))
            y = torch.nn.functional.gelu(gated) * (h - gated.tanh())
        return self.after(y).tanh()


def run(path: Path, dtype: torch.dtype, backend: Any, engine: str) -> None:
    """Dump two steps of the block, forward and backward, each with other inputs."""
    torch._dynamo.reset()
    torch.manual_seed(11)
    model = Block().to(dtype)
    options = {"path": str(path), "backend": backend, "engine": engine}
    compiled = torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)
    for _ in range(STEPS):
        x = torch.randn(SIZE, SIZE, dtype=dtype)
        compiled(x).square().sum().backward()


@dataclass(frozen=True)
class Place:
    """An operator of the scope in a compiled graph."""

    direction: str
    name: str


class Compiler:
    """An inner compiler that makes an operator of its graphs faulty; `seen` are those of scopes."""

    def __init__(self, place: Place | None = None, fault: Fault | None = None) -> None:
        self.place = place
        self.fault = fault
        self.seen: dict[Place, torch.fx.Node] = {}
        self.is_planted = False

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        direction = direction_of(gm)
        faulty = None
        for node in gm.graph.nodes:
            if node.op == "call_function" and scope_of(node) is not None:
                place = Place(direction, node.name)
                self.seen[place] = node
                faulty = node if place == self.place else faulty
        if faulty is None:
            return gm.forward
        self.is_planted = True
        fault = self.fault

        class Faulty(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                if n is not faulty:
                    return super().run_node(n)
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                return fault(n, args, kwargs)

        return lambda *args: Faulty(gm).run(*args)


# The faults: which operators they can befall, and what becomes of these.

_OTHER_KERNELS = {
    aten.add.Tensor: torch.sub,
    aten.sub.Tensor: torch.add,
    aten.mul.Tensor: torch.add,
    aten.div.Tensor: torch.mul,
    aten.tanh.default: torch.sigmoid,
    aten.sigmoid.default: torch.tanh,
    aten.rsqrt.default: torch.reciprocal,
    aten.mm.default: lambda a, b: torch.mm(b, a),
    aten.addmm.default: lambda bias, a, b: torch.mm(a, b),
    aten._softmax.default: lambda x, dim, half: aten._softmax(x, dim - 1, half),
    aten.gelu.default: torch.relu,
}
_REDUCTIONS = (aten.mm.default, aten.addmm.default, aten.mean.dim, aten.sum.dim_IntList)


def _is_float32(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _computes(node: torch.fx.Node) -> bool:
    overload = isinstance(node.target, torch._ops.OpOverload)
    return overload and not node.target.is_view and isinstance(node.meta["val"], torch.Tensor)


def _wrong_kernel(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    return _OTHER_KERNELS[node.target](*args).to(node.meta["val"].dtype)


def _in_bfloat16(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


def _dropped_cast(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """What should be computed in float32 is computed in the dtype that was to be widened."""
    return node.target(*map(_in_bfloat16, args), **kwargs).float()


def _reordered_reduction(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """The sum is taken one by one in a narrow accumulator, and not as a tree."""
    if node.target in (aten.mm.default, aten.addmm.default):
        *bias, a, b = args
        terms = (a.unsqueeze(-1) * b.unsqueeze(0)).unbind(1)
        total = _summed(terms)
        return total + bias[0] if bias else total
    x, dims, *keep = args
    (dim,) = dims
    total = _summed(x.unbind(dim))
    total = total / x.shape[dim] if node.target is aten.mean.dim else total
    return total.unsqueeze(dim) if keep and keep[0] else total


def _summed(terms: Any) -> torch.Tensor:
    total = functools.reduce(lambda total, term: total + term, map(_in_bfloat16, terms))
    return total.float()


def _stale_buffer() -> Fault:
    results: list[Any] = []

    def fault(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        results.append(node.target(*args, **kwargs))
        return results[-2] if len(results) > 1 else results[-1]

    return fault


def _mask_off_by_one(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    mask, *others = args
    return node.target(mask.roll(1, -1), *others, **kwargs)


def _wrong_epsilon(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    wrong = (0.5 if isinstance(arg, float) and arg == 1e-5 else arg for arg in args)
    return node.target(*wrong, **kwargs)


KINDS: dict[str, tuple[Callable[[torch.fx.Node], bool], Callable[[], Fault]]] = {
    "wrong kernel": (lambda node: node.target in _OTHER_KERNELS, lambda: _wrong_kernel),
    "dropped cast": (lambda node: _computes(node) and _is_float32(node), lambda: _dropped_cast),
    "reordered reduction": (
        lambda node: node.target in _REDUCTIONS and _is_float32(node),
        lambda: _reordered_reduction,
    ),
    "stale buffer": (_computes, _stale_buffer),
    "mask off by one": (
        lambda node: node.target is aten.where.self,
        lambda: _mask_off_by_one,
    ),
    "wrong epsilon": (lambda node: 1e-5 in node.args, lambda: _wrong_epsilon),
}


def candidates(seen: dict[Place, torch.fx.Node], kind: str, seed: int) -> list[Place]:
    """The places that a fault of a kind can befall, in an order that the seed decides."""
    can_befall, _ = KINDS[kind]
    places = [place for place, node in seen.items() if can_befall(node)]
    random.Random(seed).shuffle(places)
    return places
