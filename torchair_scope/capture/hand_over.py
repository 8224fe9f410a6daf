"""Hands the calls of a region of compiled code to the store, when it has run."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from torchair_scope.capture.interpreter import StepSink
from torchair_scope.capture.nodes import target_name
from torchair_scope.capture.saved import SavedCall
from torchair_scope.capture.tap_plan import Plan
from torchair_scope.capture.written import NotHandedOut


class HandOver:
    """Hands the calls of a region to the store when it has run.

    Args:
        plan: where their values come from.
        saved: what is saved of them, by names of nodes.
        gm: the module of the graph.
    """

    def __init__(
        self, plan: Plan, saved: Mapping[str, SavedCall], gm: torch.fx.GraphModule
    ) -> None:
        self.inputs = plan.inputs
        self._plan = plan
        self._saved = saved
        self._constants = {
            node: operator.attrgetter(str(node.target))(gm)
            for call in plan.calls
            for node in tree_leaves((call.args, call.kwargs))
            if isinstance(node, fx.Node) and node.op == "get_attr"
        }

    def __call__(self, values: dict[fx.Node, Any], step: StepSink) -> None:
        """Hand over one run.

        Args:
            values: those of the plan's inputs and taps, and of the region's outputs.
            step: the run.
        """
        values.update(self._constants)
        for node in self._plan.derived:
            values[node] = _derive(node, values)
        for call in self._plan.calls:
            args, kwargs, result = fx.map_arg(
                (call.args, call.kwargs, call.result), lambda used: _value(used, values)
            )
            name, target = call.node.name, target_name(call.node)
            sink = step.begin_call(name, target, args, kwargs, self._saved[name])
            sink.finish(result, {})


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    return values[node] if node in values else NotHandedOut("it is made later than it is read")


def _derive(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _value(used, values))
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        # Nothing of a dump may break a model.
        return NotHandedOut(f"{node.name} cannot be made of it, {type(error).__name__}: {error}")
