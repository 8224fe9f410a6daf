"""The dumping interpreter: runs a dumped region node by node and hands each call to the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from torchair_scope import _torch_private
from torchair_scope.capture.autograd_nodes import tensors_in
from torchair_scope.capture.bodies import as_returned
from torchair_scope.capture.memory import written_by
from torchair_scope.capture.nodes import target_name
from torchair_scope.capture.saved import Saved, SavedBody, SavedCall, SavedOperator
from torchair_scope.capture.tags import Tag
from torchair_scope.store.identity import writing

# They return what they are given, in which the result of a collective arrives meanwhile.
_WAITS = {
    f"{namespace}::wait_tensor"
    for namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
}


class CallSink(Protocol):
    """Where the outputs of a call that has begun go."""

    def finish(self, result: Any, mutated: Mapping[str, Any]) -> None:
        """Save what the operator returned and what it has changed, and the call's record."""


class StepSink(Protocol):
    """One run of one graph, as the store sees it."""

    def begin_call(
        self,
        node: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        saved: SavedCall,
    ) -> CallSink:
        """Save the inputs of a call that is about to run."""

    def saves(self, tag: Tag | None) -> bool:
        """Whether calls of a scope are saved in this step."""

    def finish(self) -> None:
        """Save what is known of the step as a whole."""


class Unsaved:
    """A step, and a call, of which nothing is saved."""

    def begin_call(self, *call: Any) -> Unsaved:
        """Save nothing of the call's inputs."""
        return self

    def saves(self, tag: Tag | None) -> bool:
        """No scope's."""
        return False

    def finish(self, *result: Any) -> None:
        """Save nothing."""


class DumpingInterpreter(torch.fx.Interpreter):
    """Runs one region of a graph, or one body in it, once; make a new one for each run.

    A shared interpreter keeps its values in one table for all threads, and keeps them after
    the run.

    An operator with bodies is called as ever, only that in the place of each body it is given a
    callable with an interpreter of its own: what the operator does with its bodies, and with what
    they return, stays torch's own doing.

    Where to change it: `begin_call` decides what of a call is handed over before it runs,
    `call_function` how it runs, `watched_arguments` what an operator is given to run.

    Args:
        graph: the region's graph, with the node names of the whole graph, or the body.
        saved: what is saved of it.
        step: the run that the calls belong to.
        place: what the names of its calls begin with.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, saved: Saved, step: StepSink, place: str = ""
    ) -> None:
        super().__init__(graph)
        self.saved = saved
        self.step = step
        self.place = place
        self.node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, and remember which it is, for `call_function`."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; its inputs are handed over before, since it may change them."""
        call = self.begin_call(self.node, args, kwargs)
        if isinstance(target, OpOverload) and not _writes(target):
            result = super().call_function(target, args, kwargs)
        else:
            result = self._run_watched(target, args, kwargs)
        if call is not None:
            call.finish(result, mutated_arguments(target, args, kwargs))
        return result

    def _run_watched(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watched = self.watched_arguments(self.node, args)
        with self._below_autograd_if_it_runs_bodies(), self._announced(target, args, kwargs):
            return super().call_function(target, watched or args, kwargs)

    def _below_autograd_if_it_runs_bodies(self) -> contextlib.AbstractContextManager[Any]:
        """A graph from AOTAutograd needs no autograd; above it, operators trace their bodies."""
        if self.node is None or self.node.name not in self.saved.bodies:
            return contextlib.nullcontext()
        return _torch_private.below_autograd()

    def _announced(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        if isinstance(target, OpOverload) or self.node is None or not written_by(self.node):
            return writes_of(target, args, kwargs)
        return writing(tensors_in((args, kwargs)))

    def begin_call(
        self, node: torch.fx.Node | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallSink | None:
        """Hand the inputs of a saved call to the store; None for a node that is not saved."""
        if node is None or node.name not in self.saved.calls:
            return None
        saved = self.saved.calls[node.name]
        return self.step.begin_call(self.place + node.name, target_name(node), args, kwargs, saved)

    def watched_arguments(
        self, node: torch.fx.Node | None, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """The arguments with what the operator is to run replaced; None if nothing is."""
        if node is None:
            return None
        watched = list(args)
        bodies = self.saved.bodies.get(node.name, {})
        for position, body in bodies.items():
            watched[position] = BodyRun(args[position], body, self.step, self.place)
        operator = self.saved.given.get(node.name)
        if operator is not None:
            position = operator.position
            watched[position] = WatchedOperator(args[position], operator, self.step, self.place)
        return tuple(watched) if bodies or operator else None


class BodyRun:
    """A body as the operator around it calls it: each call is a run with a name of its own."""

    def __init__(
        self, module: torch.fx.GraphModule, body: SavedBody, step: StepSink, place: str
    ) -> None:
        self.module = module
        self.body = body
        self.step = step
        self.place = place + body.place
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        """Run the body once."""
        place = self.place + self.body.label.of_run(self.runs)
        self.runs += 1
        run = DumpingInterpreter(self.module, self.body.saved, self.step, place)
        return as_returned(run.run(*args))


class WatchedOperator(OpOverload):
    """An operator that another one is given to run: the same, but its call is saved."""

    def __init__(
        self, operator: OpOverload, saved: SavedOperator, step: StepSink, place: str
    ) -> None:
        self.__dict__.update(operator.__dict__)
        self._operator = operator
        self._saved = saved
        self._step = step
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator, and save the call."""
        args, kwargs = _by_position(self._operator, args, kwargs)
        name = self._place + self._saved.name
        target = str(self._operator)
        call = self._step.begin_call(name, target, args, kwargs, self._saved.call)
        with writes_of(self._operator, args, kwargs):
            result = self._operator(*args, **kwargs)
        call.finish(result, mutated_arguments(self._operator, args, kwargs))
        return result

    def __eq__(self, other: object) -> bool:
        return other is self._operator or other is self

    def __hash__(self) -> int:
        return hash(self._operator)


def _by_position(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as a user's call would have them, which is how other dumps have them."""
    positional, named = list(args), dict(kwargs)
    for argument in operator._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name not in named:
            break
        positional.append(named.pop(argument.name))
    return tuple(positional), named


def writes_of(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Announces what an operator writes to while it runs."""
    if not isinstance(target, OpOverload) or not _writes(target):
        return contextlib.nullcontext()
    return writing(tensors_in((args, kwargs)))


def _writes(operator: OpOverload) -> bool:
    """Whether an operator writes to what it is given, or waits until another one has done so."""
    return operator._schema.is_mutable or operator._schema.name in _WAITS


def mutated_arguments(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that an operator has written to and does not return, by name."""
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return {}
    schema = target._schema
    returned = {name for value in schema.returns for name in _aliases(value)}
    written = {
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not returned & set(_aliases(argument))
    }
    values = {
        name: args[position] if position < len(args) else kwargs.get(name)
        for position, name in sorted(written)
    }
    return {name: value for name, value in values.items() if value is not None}


def _aliases(value: Any) -> tuple[str, ...]:
    return () if value.alias_info is None else tuple(value.alias_info.before_set)


def run_region(region: torch.fx.GraphModule, saved: Saved, step: StepSink, args: list[Any]) -> Any:
    """Run a dumped region on boxed arguments, freeing each value after its last use."""
    run: Callable[[list[Any]], Any] = DumpingInterpreter(region, saved, step).boxed_run
    return run(args)
