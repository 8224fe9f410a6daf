"""Inner compilers that compute one operator of a graph wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func

Fault = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class FaultyCompiler:
    """Compiles an ATen graph, but for one operator of it.

    Args:
        target: the operator, as `aten.gelu.default`.
        nth: which of the nodes with that target.
        fault: computes it.
        in_backward: whether it is the backward graph that is compiled wrongly.
    """

    target: str
    nth: int
    fault: Fault
    in_backward: bool = False
    planted: set[str] = field(default_factory=set)

    __name__ = "faulty"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        found = [node for node in gm.graph.nodes if str(node.target) == self.target]
        placeholders = gm.graph.find_nodes(op="placeholder")
        is_backward = any(node.name.startswith("tangents") for node in placeholders)
        if is_backward != self.in_backward:
            return make_boxed_func(gm.forward)
        faulty = found[self.nth]
        self.planted.add(faulty.name)
        fault = self.fault

        class Faulty(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                if n is not faulty:
                    return super().run_node(n)
                operands = self.fetch_args_kwargs_from_env(n)
                return fault(n.target, *operands)

        return make_boxed_func(lambda *args: Faulty(gm).run(*args))


def scaled(operator: Any, args: Any, kwargs: Any) -> Any:
    """Off by a thousandth."""
    return _first(operator(*args, **kwargs), lambda value: value * 1.001)


def narrow(operator: Any, args: Any, kwargs: Any) -> Any:
    """Rounded to bfloat16 on the way."""
    return _first(operator(*args, **kwargs), lambda value: value.bfloat16().float())


def one_nan(operator: Any, args: Any, kwargs: Any) -> Any:
    """One element is NaN."""

    def spoilt(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.view(-1)[3] = torch.nan
        return value

    return _first(operator(*args, **kwargs), spoilt)


def other_epsilon(operator: Any, args: Any, kwargs: Any) -> Any:
    """A layer norm with another epsilon."""
    return operator(*args[:-1], 1e-2, **kwargs)


def off_by_one(operator: Any, args: Any, kwargs: Any) -> Any:
    """The last column is that of its neighbour."""

    def shifted(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value[..., :-1], value[..., -2:-1]], dim=-1)

    return _first(operator(*args, **kwargs), shifted)


def swapped(operator: Any, args: Any, kwargs: Any) -> Any:
    """The operands of a product of square matrices change places."""
    return operator(args[1], args[0], **kwargs)


def dropped(operator: Any, args: Any, kwargs: Any) -> Any:
    """The second operand is left out."""
    return args[0].clone()


def stale() -> Fault:
    """The result is that of the run before."""
    last: list[Any] = []

    def fault(operator: Any, args: Any, kwargs: Any) -> Any:
        last.append(operator(*args, **kwargs))
        return last[-2] if len(last) > 1 else last[-1]

    return fault


def _first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return change(result)
    return type(result)([change(result[0]), *result[1:]])
