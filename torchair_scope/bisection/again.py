"""Run a piece of a graph again, in its own dtypes or in a higher precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchair_scope.analysis.arguments import in_precision
from torchair_scope.analysis.operators import BIT_CASTS, NotReplayableError


class RegionRun:
    """A piece as an operator: called with other floats than it was traced with, it stays in these.

    Args:
        module: the piece, as `extract` gives it.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._traced = [
            getattr(node.meta.get("val"), "dtype", None)
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]

    def __call__(self, *args: Any) -> Any:
        """Run it once."""
        given = [getattr(value, "dtype", None) for value in args]
        others = [
            dtype for dtype, traced in zip(given, self._traced, strict=True) if dtype != traced
        ]
        floats = [dtype for dtype in others if dtype is not None and dtype.is_floating_point]
        if floats:
            return _InPrecision(self._module, floats[0]).run(*args)
        return fx.Interpreter(self._module).run(*args)


class _InPrecision(fx.Interpreter):
    """Every float that the graph makes or asks for is of one dtype."""

    def __init__(self, module: fx.GraphModule, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._dtype = dtype

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) in BIT_CASTS:
            raise NotReplayableError(f"{target} reads the bits of a value")
        args, kwargs = in_precision((args, kwargs), self._dtype, str(target))
        return super().call_function(target, args, kwargs)
