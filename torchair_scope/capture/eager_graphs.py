"""Eager graphs: what the store is given, in place of graphs, by code that no compiler sees.

An *eager graph* is one place at which an outermost scope is opened, forward or backward. Each time
that the scope is entered is a step of it, and the operators that run until it is left are the
calls of that step, those of inner scopes among them. Of a backward, the step is one run of the
autograd engine. Its folder is `eager_{n}`, where `n` is counted with the compiled graphs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.fx.node import map_aggregate

from torchair_scope import _torch_private
from torchair_scope.capture import nodes
from torchair_scope.capture.compiler import (
    PATH_VARIABLE,
    DumpSettings,
    Filter,
    next_graph_number,
)
from torchair_scope.capture.effects import is_irreproducible
from torchair_scope.capture.interpreter import CallSink
from torchair_scope.capture.partition import has_own_kind
from torchair_scope.capture.tags import KEY, Tag
from torchair_scope.store.run import Run, open_run
from torchair_scope.store.writer import GraphDump, Step

Direction = Literal["forward", "backward"]


def eager_settings() -> DumpSettings:
    """What to dump of eager code, and where: the one place that says so."""
    return DumpSettings(path=os.environ.get(PATH_VARIABLE))


def run_of(settings: DumpSettings) -> Run:
    """The run that these settings lead to."""
    return open_run(settings.path, settings.on_error)


class Origin(NamedTuple):
    """Where an operator comes from: its scope, its line of code, and the module it runs in."""

    tag: Tag
    source: nodes.Source | None
    module: str | None


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
    """One entry of a scope, or one backward of it; gives each operator its name."""

    def __init__(self, step: Step) -> None:
        self._step = step
        # Names are given as to the nodes of a graph. The backward may run on several threads.
        self._names = torch.fx.Graph()
        self._naming = threading.Lock()
        self._computed: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def begin_call(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: Origin,
        facts: Mapping[str, Any],
        wanted: Filter | None,
    ) -> EagerCall | None:
        """Save the inputs of an operator that is about to run; None if it is not to be saved."""
        node = self._node(operator, args, kwargs, origin)
        if not has_own_kind(node) or (wanted is not None and wanted(node) is None):
            return None
        facts = {**_facts(node, origin), **facts}
        target = nodes.target_name(node)
        sink = self._step.begin_call(node.name, target, args, kwargs, facts)
        return EagerCall(self._step.graph, self._step.number, node.name, sink)

    def _node(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: Origin,
    ) -> torch.fx.Node:
        """The operator as a node, without tensors, for all that asks nodes."""
        name = _torch_private.node_name_of(operator)
        plain = map_aggregate((args, kwargs), _without_tensors)
        with self._naming:
            node = self._names.create_node("call_function", operator, *plain, name=name)
            self._names.erase_node(node)
        node.meta["custom"] = {KEY: tuple(origin.tag)}
        return node

    def remember(self, results: Iterable[torch.Tensor]) -> None:
        """Remember what was computed in this step, for `has_computed`."""
        self._computed.update((id(result), result) for result in results)

    def has_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was computed in this step."""
        return self._computed.get(id(tensor)) is tensor

    def finish(self) -> None:
        """Write the step's record."""
        self._step.finish()


def _without_tensors(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value


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

    def __init__(self, run: Run, direction: Direction, tag: Tag, uncompiled: str | None) -> None:
        description = {
            "direction": direction,
            "inner": "eager",
            "scope": tag.scope,
            "opened_at": tag.opened_at,
            "uncompiled": uncompiled,
        }
        self._dump: GraphDump = run.graph(next_graph_number(), description, kind="eager")

    def begin_step(self) -> EagerStep:
        """Begin to save one entry of the scope."""
        return EagerStep(self._dump.begin_step())


_graphs: dict[tuple[Run, Direction, Tag, str | None], EagerGraph] = {}
_lock = threading.Lock()


def eager_graph(
    run: Run, direction: Direction, tag: Tag, uncompiled: str | None = None
) -> EagerGraph:
    """The graph of a scope that is opened at `tag.opened_at`; the same one for each entry.

    Args:
        run: where it is dumped.
        direction: "forward", or "backward" for what the backward of its operators runs.
        tag: the scope.
        uncompiled: why the scope is reached without a compiler, though it lies in compiled code.
    """
    key = (run, direction, tag, uncompiled)
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
        self._runs: dict[DumpSettings, Run] = {}
        self._steps: dict[tuple[Run, int], EagerStep] = {}
        self._open_scopes = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _finish_all, self._steps)

    def step(self, settings: DumpSettings) -> EagerStep:
        """The step that an operator which runs now belongs to."""
        backward = _torch_private.running_backward()
        with self._lock:
            if settings not in self._runs:
                self._runs[settings] = run_of(settings)
            key = (self._runs[settings], backward)
            if key not in self._steps:
                self._steps[key] = self._begin_step(*key)
            return self._steps[key]

    def _begin_step(self, run: Run, backward: int) -> EagerStep:
        if backward == _torch_private.NO_BACKWARD:
            return eager_graph(run, "forward", *self._scope).begin_step()
        _torch_private.when_backward_ends(lambda: self._finish(backward))
        return eager_graph(run, "backward", *self._scope).begin_step()

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


def _finish_all(steps: dict[tuple[Run, int], EagerStep]) -> None:
    while steps:
        steps.popitem()[1].finish()


def _unlock() -> None:
    """A forked child's copy of the lock may be held by no one."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
