"""A cut graph: its regions, compiled and dumped, run one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair_scope import _torch_private, _torchair_private
from torchair_scope.capture.interpreter import StepSink, Unsaved, run_region
from torchair_scope.capture.layouts import Restorer
from torchair_scope.capture.saved import Saved
from torchair_scope.capture.steps import GraphSink
from torchair_scope.store.identity import writing

Boxed = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TapFacts:
    """What a region of compiled code pays for its taps.

    Attributes:
        values: how many values it returns beyond its outputs.
        kernels: how many kernels it has; None if its compiler does not count them.
        kernels_without_taps: how many it would have.
    """

    values: int
    kernels: int | None
    kernels_without_taps: int | None


@dataclass(frozen=True)
class Part:
    """A region ready to run: from the values of its `inputs` to those of its `outputs`.

    Attributes:
        run: gets the values of the inputs in a list, and empties it.
        inputs: nodes of the whole graph.
        outputs: likewise.
        taps: tells what taps have made of the region, if it can have any.
    """

    run: Callable[[list[Any], StepSink], Sequence[Any]]
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]
    taps: Callable[[], TapFacts | None] = lambda: None


def compiled_part(
    run: Boxed,
    inputs: tuple[torch.fx.Node, ...],
    outputs: tuple[torch.fx.Node, ...],
    *,
    writes: bool,
) -> Part:
    """A part that the inner compiler has compiled; `writes` says if it writes to any input."""
    announced = announcing(run) if writes else run
    return Part(lambda args, step: announced(args), inputs, outputs)


def announcing(run: Boxed) -> Boxed:
    """Compiled code that writes to its inputs, and says so to the store."""

    def run_and_announce(args: list[Any]) -> Any:
        with writing(tuple(args)):
            return run(args)

    return run_and_announce


def dumped_part(
    region: torch.fx.GraphModule,
    saved: Saved,
    restore: Restorer,
    inputs: tuple[torch.fx.Node, ...],
    outputs: tuple[torch.fx.Node, ...],
) -> Part:
    """A part that is interpreted, and of which the calls in `saved` are saved."""
    # Operators with bodies are left to the interpreter, which knows how to call them.
    undumped = None if saved.bodies else _torch_private.run_uncompiled(_shallow_copy(region))

    def run(args: list[Any], step: StepSink) -> Sequence[Any]:
        if isinstance(step, Unsaved) and undumped is not None:
            return restore(undumped(args))
        return restore(run_region(region, saved, step, args))

    return Part(run, inputs, outputs)


def _shallow_copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module with a graph of its own, to be run in another way."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    return torch.fx.GraphModule(gm, graph)


class CutGraph:
    """Runs the parts of a graph in order; takes a list of arguments and empties it.

    Values are kept by node from the part that makes them to the last one that reads them. Any
    number of threads may run one object at once.
    """

    def __init__(self, gm: torch.fx.GraphModule, parts: Sequence[Part], sink: GraphSink) -> None:
        # On the instance, where functools.wraps, and so Dynamo's disable, finds it.
        self._boxed_call = True
        self._sink = sink
        self._said_captured = False
        self._placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        (self._result,) = next(iter(reversed(gm.graph.nodes))).args
        self._constants = {
            node: _attribute(gm, node.target)
            for node in _nodes_in(self._result)
            if node.op == "get_attr"
        }
        self._parts = list(zip(parts, _last_reads(parts, _nodes_in(self._result)), strict=True))

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph once: one step of the dump."""
        step = Unsaved() if self._is_captured() else self._sink.begin_step(announced=True)
        try:
            return self._run(args, step)
        finally:
            step.finish()

    def _is_captured(self) -> bool:
        """Whether a device graph is being captured around this run: nothing can be saved then."""
        if not is_captured():
            return False
        if not self._said_captured:
            self._said_captured = True
            warnings.warn(
                "a scope is run while a device graph is captured, when nothing can be copied to "
                "the host: this run is not dumped. Capture the model without the scope, or run it "
                "without capturing it.",
                stacklevel=3,
            )
        return True

    def _run(self, args: list[Any], step: StepSink) -> Any:
        values = dict(zip(self._placeholders, args, strict=True))
        args.clear()
        values.update(self._constants)
        for part, last_reads in self._parts:
            inputs = [values[node] for node in part.inputs]
            for node in last_reads:
                values.pop(node, None)
            outputs = part.run(inputs, step)
            values.update(zip(part.outputs, outputs, strict=True))
            del inputs, outputs
        return torch.fx.map_arg(self._result, values.__getitem__)


def is_captured() -> bool:
    """Whether a device graph is being captured on this thread."""
    return _torch_private.is_capturing() or _torchair_private.is_capturing()


def _nodes_in(argument: Any) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []
    torch.fx.map_arg(argument, nodes.append)
    return nodes


def _attribute(gm: torch.fx.GraphModule, path: Any) -> Any:
    value: Any = gm
    for step in str(path).split("."):
        value = getattr(value, step)
    return value


def _last_reads(
    parts: Sequence[Part], returned: Sequence[torch.fx.Node]
) -> list[list[torch.fx.Node]]:
    """For each part the values that no later part reads and the graph does not return."""
    read_later = set(returned)
    last_reads: list[list[torch.fx.Node]] = []
    for part in reversed(parts):
        last_reads.append([node for node in part.inputs if node not in read_later])
        read_later.update(part.inputs)
    return last_reads[::-1]
