"""The engine `tap`: the values that the compiled code itself has computed.

The operators of a scope stay in the compiled code. Their values become further outputs of it, are
handed to the store as the interpreter would hand them, and are let go before the caller sees them.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.border import at_borders
from torchair_scope.capture.cut import Part, compiled_part
from torchair_scope.capture.interpreter import StepSink, Unsaved
from torchair_scope.capture.layouts import layout_restorer
from torchair_scope.capture.memory import written_by
from torchair_scope.capture.nodes import target_name
from torchair_scope.capture.overwritten import with_copies
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler
from torchair_scope.capture.saved import Saved, SavedCall
from torchair_scope.capture.tap_plan import Plan, plan_taps, unpack
from torchair_scope.capture.tapped_code import (
    CannotTapError,
    TappedCode,
    compile_with_taps,
    compile_without_taps,
)
from torchair_scope.capture.written import NotHandedOut, Written, WrittenCall
from torchair_scope.store.identity import writing


class Tap:
    """Obtains values of calls as further outputs of the compiled code that they are in."""

    cuts = False

    def __init__(self, gm: fx.GraphModule, written: Written, saved: Saved) -> None:
        self._saved = saved.calls
        tapped = (call for node, call in written.calls.items() if node.name in saved.calls)
        calls = list(at_borders(tapped, saved.calls))
        for call in calls:
            unpack(call.place)
        self._calls: dict[fx.Node, list[WrittenCall]] = {}
        for call in with_copies(gm.graph, calls):
            self._calls.setdefault(call.place, []).append(call)

    def holds(self, node: fx.Node) -> bool:
        """Whether a tapped call has its first result from a node."""
        return node in self._calls

    def connected(self, regions: list[Region]) -> list[Region]:
        """The regions, with what they need of each other to hand over their calls."""
        made_in = {node: index for index, region in enumerate(regions) for node in region.nodes}
        wanted: set[fx.Node] = set()
        connected = []
        for index, region in enumerate(regions):
            plan = plan_taps(region, self._calls_in(region))
            missing = [
                node
                for node in plan.inputs
                if node not in region.inputs and made_in.get(node, -1) < index
            ]
            wanted.update(missing)
            connected.append(replace(region, inputs=(*region.inputs, *missing)))
        return [
            replace(
                region,
                outputs=tuple(
                    node for node in region.nodes if node in wanted or node in region.outputs
                ),
            )
            for region in connected
        ]

    def part(self, compiler: RegionCompiler, region: Region) -> Part:
        """Compile a region with taps, and hand over what they give after each run."""
        calls = self._calls_in(region)
        plan = plan_taps(region, calls)
        try:
            code = compile_with_taps(compiler, region, plan.taps)
        except CannotTapError as error:
            self._give_up(calls, error)
            return compile_without_taps(compiler, region)
        return _tapped_part(code, region, plan, HandOver(plan, self._saved, compiler.gm))

    def _calls_in(self, region: Region) -> list[WrittenCall]:
        return [call for node in region.nodes for call in self._calls.get(node, ())]

    def _give_up(self, calls: Sequence[WrittenCall], error: Exception) -> None:
        names = [call.node.name for call in calls]
        warnings.warn(
            f"the values from {names[0]} to {names[-1]} are not dumped, and what computes them is "
            f"compiled as without a scope, since {error}. Take a smaller scope, or tap='boundary', "
            "or engine='interpret'.",
            stacklevel=2,
        )
        account.note([self._saved[name].number for name in names], Outcome.NOT_TAPPED)


def _tapped_part(code: TappedCode, region: Region, plan: Plan, hand_over: HandOver) -> Part:
    sources = (*region.outputs, *plan.taps)
    writes = any(map(written_by, region.nodes))
    compiled = compiled_part(code.run, code.inputs, sources, writes=writes)
    positions = {node: code.inputs.index(node) for node in plan.inputs if node in code.inputs}
    count = len(region.outputs)
    # Views are made of the layouts that were traced.
    restore = layout_restorer([node.meta.get("val") for node in sources])

    def run_and_hand_over(args: list[Any], step: StepSink) -> Sequence[Any]:
        if isinstance(step, Unsaved):
            return compiled.run(args, step)[:count]
        values = {node: args[position] for node, position in positions.items()}
        outputs = compiled.run(args, step)
        with writing(outputs):
            pass  # Code that has buffers of its own has just written to them once more.
        values.update(zip(sources, restore(outputs), strict=True))
        hand_over(values, step)
        return outputs[:count]

    return Part(run_and_hand_over, code.inputs, region.outputs, code.facts)


class HandOver:
    """Hands the calls of a region to the store when it has run."""

    def __init__(
        self, plan: Plan, saved: Mapping[str, SavedCall], gm: torch.fx.GraphModule
    ) -> None:
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
