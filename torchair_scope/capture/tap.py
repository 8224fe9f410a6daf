"""The engine `tap`: the values that the compiled code itself has computed.

The operators of a scope stay in the compiled code. Their values become further outputs of it, are
handed to the store as the interpreter would hand them, and are let go before the caller sees them.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.cut import Part
from torchair_scope.capture.interpreter import StepSink, Unsaved
from torchair_scope.capture.layouts import layout_restorer
from torchair_scope.capture.memory import storages, written_by
from torchair_scope.capture.nodes import target_name
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler
from torchair_scope.capture.saved import Saved
from torchair_scope.capture.symbols import is_symbolic, value_of
from torchair_scope.capture.tapped_code import (
    CannotTapError,
    TappedCode,
    compile_with_taps,
    compile_without_taps,
)
from torchair_scope.capture.targets import handles_tokens, is_call

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


class NotHandedOut:
    """Stands in a record for a value that the compiled code does not return; its text says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return f"<not handed out by the compiled code: {self._reason}>"


class Tap:
    """Obtains values of calls as further outputs of the compiled code that they are in."""

    cuts = False

    def __init__(self, gm: fx.GraphModule, saved: Saved) -> None:
        self._saved = saved
        calls = [node for node in gm.graph.nodes if self.holds(node)]
        for node in calls:
            _unpack(node)
        self._copies = _copies_before_writes(gm.graph, calls)

    def holds(self, node: fx.Node) -> bool:
        """Whether a node is tapped."""
        return node.name in self._saved.calls

    def part(self, compiler: RegionCompiler, region: Region) -> Part:
        """Compile a region with taps, and hand over what they give after each run."""
        calls = [node for node in region.nodes if self.holds(node)]
        plan = _Planner(region, self._copies).plan(calls)
        try:
            code = compile_with_taps(compiler, region, plan.taps)
        except CannotTapError as error:
            self._give_up(calls, error)
            return compile_without_taps(compiler, region)
        return _tapped_part(code, region, plan, HandOver(plan, self._saved, compiler.gm))

    def _give_up(self, calls: Sequence[fx.Node], error: Exception) -> None:
        warnings.warn(
            f"the values from {calls[0].name} to {calls[-1].name} are not dumped, and what "
            f"computes them is compiled as without a scope, since {error}. Take a smaller scope, "
            "or tap='boundary', or engine='interpret'.",
            stacklevel=2,
        )
        account.note([self._saved.calls[node.name].number for node in calls], Outcome.NOT_TAPPED)


def _tapped_part(code: TappedCode, region: Region, plan: Plan, hand_over: HandOver) -> Part:
    run = code.run
    positions = [code.inputs.index(node) for node in plan.inputs]
    count = len(region.outputs)
    sources = (*plan.inputs, *region.outputs, *plan.taps)
    restore = layout_restorer([node.meta.get("val") for node in plan.taps])

    def run_and_hand_over(args: list[Any], step: StepSink) -> Sequence[Any]:
        if isinstance(step, Unsaved):
            return list(run(args)[:count])
        inputs = [args[position] for position in positions]
        outputs: Sequence[Any] = run(args)
        values = (*inputs, *outputs[:count], *restore(outputs[count:]))
        hand_over(dict(zip(sources, values, strict=True)), step)
        return outputs[:count]

    return Part(run_and_hand_over, code.inputs, region.outputs, code.facts)


# What is to be returned


@dataclass(frozen=True)
class TappedCall:
    """A call whose values are handed over; what is a node in these stands for its value."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class Plan:
    """How the calls of one region get their values.

    Attributes:
        calls: in program order.
        inputs: the inputs of the region that are read.
        taps: the values that the compiled code has to return beyond its own outputs.
        derived: what is made of the others when they are there: views, and numbers. Neither costs
            an output, and no output shares memory with another one for being a view of it.
    """

    calls: tuple[TappedCall, ...]
    inputs: tuple[fx.Node, ...]
    taps: tuple[fx.Node, ...]
    derived: tuple[fx.Node, ...]


class _Planner:
    """Finds where each value of a region's calls comes from."""

    def __init__(self, region: Region, copies: Copies) -> None:
        self._region = region
        self._copies = copies
        self._inside = set(region.nodes)
        self._sources: dict[fx.Node, Any] = {}
        self._inputs: list[fx.Node] = []
        self._taps: list[fx.Node] = []
        self._derived: list[fx.Node] = []

    def plan(self, calls: Iterable[fx.Node]) -> Plan:
        """Plan for these calls."""
        planned = tuple(map(self._call, calls))
        return Plan(planned, tuple(self._inputs), tuple(self._taps), tuple(self._derived))

    def _call(self, node: fx.Node) -> TappedCall:
        args = fx.map_arg(node.args, lambda used: self._source(self._copies.read(node, used)))
        kwargs = fx.map_arg(node.kwargs, lambda used: self._source(self._copies.read(node, used)))
        result = self._source(self._copies.result(node))
        return TappedCall(node, args, kwargs, result)

    def _source(self, node: fx.Node) -> Any:
        """A node whose value will be known, a tuple of such, or what stands in its place."""
        if node not in self._sources:
            self._sources[node] = self._find(node)
        return self._sources[node]

    def _find(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return node
        if node not in self._inside:
            return self._input(node)
        if node in self._region.outputs:
            return node
        if self._is_derived(node):
            for used in node.all_input_nodes:
                self._source(used)
            self._derived.append(node)
            return node
        return self._tapped(node, value_of(node))

    def _input(self, node: fx.Node) -> Any:
        if node not in self._region.inputs:
            return NotHandedOut("it is overwritten before the graph ends, in another part of it")
        self._inputs.append(node)
        return node

    def _is_derived(self, node: fx.Node) -> bool:
        if _is_view(node):
            return True
        if node.target is operator.getitem:
            producer = node.all_input_nodes[0]
            return producer in self._inside and self._is_derived(producer)
        return is_symbolic(node) and all(
            used not in self._inside or self._is_derived(used) for used in node.all_input_nodes
        )

    def _tapped(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *_NUMBERS)):
            self._taps.append(node)
            return node
        if not isinstance(value, (tuple, list, dict)):
            return _without_node(node, value)
        elements = _elements(node)
        sources = {
            key: self._source(elements[key]) if key in elements else _without_node(node, item)
            for key, item in _items(value)
        }
        return sources if isinstance(value, dict) else type(value)(sources.values())


def _without_node(node: fx.Node, value: Any) -> Any:
    if value is None:
        return None
    if handles_tokens(node):
        return NotHandedOut("an effect token")
    return NotHandedOut(f"a value of type {type(value).__name__}")


def _unpack(node: fx.Node) -> None:
    """Give each tensor in the result of a node a node of its own."""
    value = value_of(node)
    if not isinstance(value, (tuple, list, dict)) or _is_view(node):
        return
    known = _elements(node)
    for key, item in _items(value):
        if isinstance(item, torch.Tensor) and key not in known:
            with node.graph.inserting_after(node):
                element = node.graph.call_function(operator.getitem, (node, key))
            element.meta["val"] = item


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _elements(node: fx.Node) -> dict[Any, fx.Node]:
    elements: dict[Any, fx.Node] = {}
    for user in node.users:
        if user.target is operator.getitem and user.args[0] is node:
            elements.setdefault(user.args[1], user)
    return elements


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


# Values that are overwritten before the graph has run


@dataclass
class Copies:
    """Copies of values that are written to later on, made where they are read.

    Attributes:
        of_inputs: by the call that reads a value, and that value.
        of_results: by call.
    """

    of_inputs: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    of_results: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def read(self, call: fx.Node, value: fx.Node) -> fx.Node:
        """The node that has a value as it was when the call read it."""
        return self.of_inputs.get((call, value), value)

    def result(self, call: fx.Node) -> fx.Node:
        """The node that has the result of a call as it was right after it."""
        return self.of_results.get(call, call)


def _copies_before_writes(graph: fx.Graph, calls: Sequence[fx.Node]) -> Copies:
    """Put a copy into the graph for each value of a call that the graph overwrites later.

    What is handed over is read when all of the compiled code has run.
    """
    writes = _writes(graph)
    copies = Copies()
    if not writes:
        return copies
    storage = storages(graph)
    place = {node: index for index, node in enumerate(graph.nodes)}
    made: dict[tuple[fx.Node, int], fx.Node] = {}

    def copy_of(value: fx.Node, call: fx.Node, seen_at: int) -> fx.Node | None:
        """The copy of a value as the writes up to a place have left it; None if it needs none."""
        at = writes[storage[value]]
        if not isinstance(value_of(value), torch.Tensor) or not any(w >= seen_at for w in at):
            return None
        state = (value, sum(w < seen_at for w in at))
        if state not in made:
            made[state] = _insert_copy(graph, value, call, after=seen_at > place[call])
        return made[state]

    for call in calls:
        for value in call.all_input_nodes:
            copy = copy_of(value, call, place[call])
            if copy is not None:
                copies.of_inputs[call, value] = copy
        copy = copy_of(call, call, place[call] + 1)
        if copy is not None:
            copies.of_results[call] = copy
    return copies


def _writes(graph: fx.Graph) -> Mapping[fx.Node, list[int]]:
    """For each memory the places of the nodes that write to it."""
    storage: dict[fx.Node, fx.Node] = {}
    writes: dict[fx.Node, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        for written in written_by(node) if is_call(node) else ():
            storage = storage or storages(graph)
            writes[storage[written]].append(index)
    return writes


def _insert_copy(graph: fx.Graph, value: fx.Node, call: fx.Node, *, after: bool) -> fx.Node:
    with graph.inserting_after(call) if after else graph.inserting_before(call):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    traced = value_of(value)
    # A fake value of its own, since compilers read from these which nodes share memory.
    with traced.fake_mode:
        copy.meta["val"] = traced.clone()
    return copy


# After each run


class HandOver:
    """Hands the calls of a region to the store when it has run."""

    def __init__(self, plan: Plan, saved: Saved, gm: fx.GraphModule) -> None:
        self._plan = plan
        self._saved = saved
        constants: dict[fx.Node, Any] = {}
        for call in plan.calls:
            for node in _nodes_of((call.args, call.kwargs)):
                if node.op == "get_attr":
                    constants[node] = operator.attrgetter(str(node.target))(gm)
        self._constants = constants

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
                (call.args, call.kwargs, call.result), values.__getitem__
            )
            name, target = call.node.name, target_name(call.node)
            sink = step.begin_call(name, target, args, kwargs, self._saved.calls[name])
            sink.finish(result, {})


def _derive(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        # Nothing of a dump may break a model.
        return NotHandedOut(f"{node.name} cannot be made of it, {type(error).__name__}: {error}")


def _nodes_of(argument: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return nodes
