"""Eager graphs: what the store is given, in place of graphs, by code that no compiler sees.

An *eager graph* is one place at which an outermost scope is opened, forward or backward. Each time
that the scope is entered is a step of it, and the operators that run until it is left are the
calls of that step, those of inner scopes among them. Of a backward, the step is one run of the
autograd engine. Its folder is `eager_{n}`, where `n` is counted with the compiled graphs.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OperatorBase

from torchair_scope import _torch_private
from torchair_scope.capture import nodes
from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.compiler import next_graph_number, why_left_out
from torchair_scope.capture.eager_bodies import Names, place_in
from torchair_scope.capture.effects import is_irreproducible
from torchair_scope.capture.interpreter import CallSink
from torchair_scope.capture.partition import has_own_kind
from torchair_scope.capture.settings import Filter
from torchair_scope.capture.steps import (
    Destination,
    begin_step,
    condition_of,
    pace_of,
    why_skipped,
)
from torchair_scope.capture.tags import KEY, Tag
from torchair_scope.options import Options
from torchair_scope.store.choice import Choice
from torchair_scope.store.files import Pace
from torchair_scope.store.run import open_run
from torchair_scope.store.trigger import Condition, HeldStep
from torchair_scope.store.writer import GraphDump, Step

Direction = Literal["forward", "backward"]
Begin = Callable[[int, Pace, Condition | None], Step | HeldStep]
_NO_KIND = Outcome.NO_TENSOR


class Origin(NamedTuple):
    """Where an operator comes from: its scope, its line of code, and the module it runs in."""

    tag: Tag
    source: nodes.Source | None
    module: str | None


class Running(NamedTuple):
    """An operator that is about to run, and the names of the body that it is in, if it is."""

    operator: OperatorBase
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Names | None


class EagerCall(NamedTuple):
    """A call that has begun: its place in the dump, and where its outputs go."""

    graph: int
    step: int
    node: str
    sink: CallSink

    def place(self) -> dict[str, Any]:
        """The call as a reference in another call's record."""
        return {"graph": self.graph, "step": self.step, "node": self.node}


class EagerStep:
    """One entry of a scope, or one backward of it; gives each operator its name.

    Args:
        number: which entry, or which backward, it is.
        is_backward: whether it is a backward: that of operators that are dumped is dumped.
        begin: begins the step of the dump; called for the first call that is dumped.
    """

    def __init__(self, number: int, is_backward: bool, begin: Begin) -> None:
        self.number = number
        self._is_backward = is_backward
        self._begin = begin
        self._begun: dict[Condition | None, Step | HeldStep] = {}
        self._orders = itertools.count()
        # The backward may run on several threads.
        self._names = Names()
        self._naming = threading.Lock()
        self._computed: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def skips(self, origin: Origin, options: Options) -> bool:
        """Whether the step is not to be dumped; the account is told of an operator in it."""
        skipped = why_skipped(options, None if self._is_backward else self.number)
        if skipped is not None:
            account.ran(origin.tag, skipped)
        return skipped is not None

    def node(self, running: Running, origin: Origin) -> torch.fx.Node:
        """The operator that is about to run as a node, with its name."""
        with self._naming:
            names = running.names or self._names
            node = names.node(running.operator, running.args, running.kwargs)
        node.meta["custom"] = {KEY: tuple(origin.tag)}
        return node

    def place(self, running: Running, node: torch.fx.Node) -> str:
        """What the names of calls begin with in the bodies of an operator."""
        return place_in(running.names or self._names, node)

    def begin_call(
        self,
        running: Running,
        node: torch.fx.Node,
        origin: Origin,
        facts: Mapping[str, Any],
        asked: tuple[Options, Filter | None],
    ) -> EagerCall | None:
        """Save the inputs of an operator that is about to run; None if it is not to be saved."""
        options, wanted = asked
        left_out = why_left_out(options, wanted, node) if has_own_kind(node) else _NO_KIND
        if left_out is not None:
            account.ran(origin.tag, left_out)
            return None
        return self._saved(running, node, {**_facts(node, origin), **facts}, origin, options)

    def _saved(
        self,
        running: Running,
        node: torch.fx.Node,
        facts: Mapping[str, Any],
        origin: Origin,
        options: Options,
    ) -> EagerCall:
        condition = condition_of(options)
        with self._naming:
            if condition not in self._begun:
                self._begun[condition] = self._begin(self.number, pace_of([options]), condition)
            step, order = self._begun[condition], next(self._orders)
        report = account.begun_eagerly(origin.tag)
        target, mode, choice = nodes.target_name(node), options.mode or "all", Choice.of(options)
        name = (running.names or self._names).place + node.name
        args, kwargs = running.args, running.kwargs
        sink = step.begin_call(name, target, args, kwargs, facts, mode, report, choice, order)
        return EagerCall(step.graph, self.number, name, sink)

    def remember(self, results: Iterable[torch.Tensor]) -> None:
        """Remember what was computed in this step, for `has_computed`."""
        self._computed.update((id(result), result) for result in results)

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was computed in this step."""
        return self._computed.get(id(tensor)) is tensor

    def finish(self) -> None:
        """Write the step's record, if anything of it is dumped."""
        for step in self._begun.values():
            step.finish()


def _facts(node: torch.fx.Node, origin: Origin) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "scope": origin.tag.scope,
        "opened_at": origin.tag.opened_at,
        "source": None if origin.source is None else origin.source._asdict(),
        "module": origin.module,
    }
    if is_irreproducible(node):
        facts["nondeterministic"] = True
    return facts


class EagerGraph:
    """One place at which an outermost scope is opened, in one direction and one dump."""

    def __init__(
        self,
        destination: Destination,
        direction: Direction,
        tag: Tag,
        uncompiled: str | None,
    ) -> None:
        self._destination = destination
        self._steps = itertools.count()
        self._dump: GraphDump | None = None
        self._lock = threading.Lock()
        self._description = {
            "direction": direction,
            "inner": "eager",
            "scope": tag.scope,
            "opened_at": tag.opened_at,
            "uncompiled": uncompiled,
        }

    def begin_step(self) -> EagerStep:
        """Begin one entry of the scope, or one backward."""
        is_backward = self._description["direction"] == "backward"
        return EagerStep(next(self._steps), is_backward, self._begin)

    def _begin(self, number: int, pace: Pace, condition: Condition | None) -> Step | HeldStep:
        with self._lock:
            if self._dump is None:
                run = open_run(*self._destination)
                self._dump = run.graph(next_graph_number(), self._description, kind="eager")
            scope = self._description["scope"]
            return begin_step(self._dump, number, pace, scope, self._destination, condition)


_graphs: dict[tuple[Destination, Direction, Tag, str | None], EagerGraph] = {}
_lock = threading.Lock()


def eager_graph(
    destination: Destination, direction: Direction, tag: Tag, uncompiled: str | None = None
) -> EagerGraph:
    """The graph of a scope that is opened at `tag.opened_at`; the same one for each entry.

    Args:
        destination: where it is dumped, as `open_run` takes it.
        direction: "forward", or "backward" for what the backward of its operators runs.
        tag: the scope.
        uncompiled: why the scope is reached without a compiler, though it lies in compiled code.
    """
    key = (destination, direction, tag, uncompiled)
    with _lock:
        if key not in _graphs:
            _graphs[key] = EagerGraph(*key)
        return _graphs[key]


class Entry:
    """One time that an outermost scope is entered: its steps, forward and backward.

    The autograd nodes that were made in it keep it alive. The end of a backward that failed
    cannot be noticed: its step ends when the last of these nodes is gone.
    """

    def __init__(self, tag: Tag, uncompiled: str | None = None) -> None:
        self._scope = (tag, uncompiled)
        self._steps: dict[tuple[Destination, int], EagerStep] = {}
        self._open_scopes = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _finish_all, self._steps)

    def step(self, options: Options) -> EagerStep:
        """The step that an operator which runs now belongs to."""
        backward = _torch_private.running_backward()
        # The folder as it is now: the current one may be another the next time.
        destination = (os.path.realpath(options.path or "."), options.on_error)
        key = (destination, backward)
        with self._lock:
            if key not in self._steps:
                self._steps[key] = self._begin_step(*key)
            return self._steps[key]

    def _begin_step(self, destination: Destination, backward: int) -> EagerStep:
        if backward == _torch_private.NO_BACKWARD:
            return eager_graph(destination, "forward", *self._scope).begin_step()
        _torch_private.when_backward_ends(lambda: self._finish(backward))
        return eager_graph(destination, "backward", *self._scope).begin_step()

    def enter(self) -> None:
        """The scope, or one within it, is opened."""
        self._open_scopes += 1

    def leave(self) -> None:
        """One of the scopes is left; with the last one ends the step."""
        self._open_scopes -= 1
        if self._open_scopes == 0:
            self._finish(_torch_private.NO_BACKWARD)

    def _finish(self, backward: int) -> None:
        with self._lock:
            ended = [self._steps.pop(key) for key in list(self._steps) if key[1] == backward]
        for step in ended:
            step.finish()


def _finish_all(steps: dict[tuple[Destination, int], EagerStep]) -> None:
    while steps:
        steps.popitem()[1].finish()


def _unlock() -> None:
    """A forked child's copy of the lock may be held by no one."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
