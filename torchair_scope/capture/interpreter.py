"""The dumping interpreter: runs a dumped region node by node and hands each call to the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from torchair_scope.capture.nodes import target_name


class CallSink(Protocol):
    """Where the outputs of a call that has begun go."""

    def finish(self, result: Any) -> None:
        """Save what the operator returned, and the call's record."""


class StepSink(Protocol):
    """One run of one graph, as the store sees it."""

    def begin_call(
        self, node: str, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], facts: Any
    ) -> CallSink:
        """Save the inputs of a call that is about to run."""

    def finish(self) -> None:
        """Save what is known of the step as a whole."""


class Unsaved:
    """A step, and a call, of which nothing is saved."""

    def begin_call(self, *call: Any) -> Unsaved:
        """Save nothing of the call's inputs."""
        return self

    def finish(self, *result: Any) -> None:
        """Save nothing."""


class DumpingInterpreter(torch.fx.Interpreter):
    """Runs one region of a graph once; make a new one for each run, they are cheap.

    A shared interpreter keeps its values in one table for all threads, and keeps them after
    the run.

    Where to change it: `begin_call` decides what of a call is handed over before it runs,
    `call_function` how it runs.

    Args:
        region: the region's graph, with the node names of the whole graph.
        calls: for each node that is saved, what is known of it at compile time.
        step: the run that the calls belong to.
    """

    def __init__(
        self,
        region: torch.fx.GraphModule,
        calls: Mapping[str, Mapping[str, Any]],
        step: StepSink,
    ) -> None:
        super().__init__(region)
        self.calls = calls
        self.step = step
        self.node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, and remember which it is, for `call_function`."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; its inputs are handed over before, since it may change them."""
        call = self.begin_call(self.node, args, kwargs)
        if call is None:
            return super().call_function(target, args, kwargs)
        result = super().call_function(target, args, kwargs)
        call.finish(result)
        return result

    def begin_call(
        self, node: torch.fx.Node | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallSink | None:
        """Hand the inputs of a saved call to the store; None for a node that is not saved."""
        if node is None or node.name not in self.calls:
            return None
        return self.step.begin_call(
            node.name, target_name(node), args, kwargs, self.calls[node.name]
        )


def run_region(
    region: torch.fx.GraphModule,
    calls: Mapping[str, Mapping[str, Any]],
    step: StepSink,
    args: list[Any],
) -> Any:
    """Run a dumped region on boxed arguments, freeing each value after its last use."""
    run: Callable[[list[Any]], Any] = DumpingInterpreter(region, calls, step).boxed_run
    return run(args)
