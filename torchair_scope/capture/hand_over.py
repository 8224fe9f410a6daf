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
        # What is the same in each run is looked up once.
        self._derived = [(node, node.target, (node.args, node.kwargs)) for node in plan.derived]
        self._calls = [
            (
                call.node.name,
                target_name(call.node),
                saved[call.node.name],
                (call.args, call.kwargs, call.result),
            )
            for call in plan.calls
        ]
        self._constants = {
            node: operator.attrgetter(str(node.target))(gm)
            for call in plan.calls
            for node in tree_leaves((call.args, call.kwargs))
            if isinstance(node, fx.Node) and node.op == "get_attr"
        }

    def __call__(self, given: Mapping[fx.Node, Any], step: StepSink) -> None:
        """Hand over one run.

        Args:
            given: values of the plan's inputs and taps, and of the region's outputs.
            step: the run.
        """
        values = _Values(given)
        values.update(self._constants)
        value_of = values.__getitem__
        for node, target, arguments in self._derived:
            values[node] = _derive(node, target, *fx.map_arg(arguments, value_of))
        for name, target, saved, tree in self._calls:
            args, kwargs, result = fx.map_arg(tree, value_of)
            step.begin_call(name, target, args, kwargs, saved).finish(result, {})


class _Values(dict[fx.Node, Any]):
    def __missing__(self, node: fx.Node) -> NotHandedOut:
        return NotHandedOut("it is made later than it is read")


def _derive(node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
    try:
        return target(*args, **kwargs)
    except Exception as error:
        # Nothing of a dump may break a model.
        return NotHandedOut(f"{node.name} cannot be made of it, {type(error).__name__}: {error}")
