"""Scopes that no compiler sees: the operators that run in eager code are dumped as they run.

    with torchair.scope.data_dump("mlp"):      # in code that is not compiled
        y = mlp(x)

A scope is a dispatch mode on the thread that opened it: each ATen operator passes through it, is
saved, and runs as ever. The backward of what ran in the scope is saved too: the autograd nodes
that were made in it get hooks, which put a mode of their own around each node.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torchair_scope import _torch_private, switch
from torchair_scope.capture import uncompiled
from torchair_scope.capture.account import account
from torchair_scope.capture.autograd_nodes import NodeFinder, tensors_in
from torchair_scope.capture.eager_bodies import Names, watched_bodies
from torchair_scope.capture.eager_graphs import EagerCall, Entry, Origin, Running
from torchair_scope.capture.frames import is_recomputing, module_here, opened_at, source_here
from torchair_scope.capture.interpreter import mutated_arguments, writes_of
from torchair_scope.capture.nodes import module_of, source_of
from torchair_scope.capture.other_backends import outermost_scope_is_left, watch_compiled_calls
from torchair_scope.capture.settings import DumpSettings
from torchair_scope.capture.tags import Tag, tag_of
from torchair_scope.options import NONE, Options

__all__ = ["EagerScope", "SavingMode", "open_mode"]

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class EagerScope(AbstractContextManager[None]):
    """What `data_dump` gives in code that is not compiled. It may be entered more than once."""

    def __init__(self, name: str | None, options: Options = NONE) -> None:
        self._name = name
        self._options = options
        self._entered: list[_ScopeMode] = []

    def __enter__(self) -> None:
        compiling = within = _torch_private.set_callback(None)
        try:
            mode = _ScopeMode(self._name, self._options)
            self._entered.append(mode)
            mode.open()
            within = mode.callback_within(compiling)
        finally:
            _torch_private.set_callback(within)

    def __exit__(self, *exc_info: object) -> None:
        compiling = after = _torch_private.set_callback(None)
        try:
            mode = self._entered.pop()
            after = mode.callback_after(compiling)
            mode.close()
        finally:
            _torch_private.set_callback(after)


class _Thread(threading.local):
    """What this thread is doing."""

    innermost: SavingMode | None = None
    saved_by: SavingMode | None = None  # has saved the operator that is being run


_thread = _Thread()
_mode_numbers = itertools.count()


def open_mode() -> SavingMode | None:
    """The innermost mode that is open on this thread; one look-up while there is none."""
    mode = _thread.innermost
    while mode is not None and not mode.is_open():
        mode = _thread.innermost = mode.outer
    return mode


def _sees_calls() -> bool:
    """Whether what is called on this thread belongs to a scope."""
    return open_mode() is not None and switch.on and not _torch_private.is_tracing()


class SavingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves each operator that runs while it is on the stack of dispatch modes.

    Where to change it: `wants` decides which operators are saved, `origin` and `facts` what is
    known of one.
    """

    supports_higher_order_operators = True

    def __init__(
        self, entry: Entry, tag: Tag, settings: DumpSettings, outer: SavingMode | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entry = entry
        self.tag = tag
        self.settings = settings
        self.outer = outer
        self._number = next(_mode_numbers)
        self.options = NONE
        self._node: torch.fx.Node | None = None
        self._runs_graph = False
        self._names: Names | None = None  # those of the body that is being run
        self._nodes = NodeFinder(self._save_runs_of)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo go on compiling."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's own way to keep Dynamo out imports it at the first operator; see `skip_frames`.
        return False

    def is_open(self) -> bool:
        """Whether what this thread runs now belongs to the mode."""
        raise NotImplementedError

    def open(self) -> None:
        """Put the mode on this thread's stack."""
        _thread.innermost = self
        _torch_private.push_mode(self)

    @contextlib.contextmanager
    def running_graph(self, settings: DumpSettings) -> Iterator[Callable[[torch.fx.Node], None]]:
        """Save what a graph runs by the settings of its backend; yields what to tell its node."""
        outside = self.settings, self._node, self._runs_graph
        self.settings, self._runs_graph = settings.within(self.options), True
        try:
            yield self._set_node
        finally:
            self._nodes.look()
            self.settings, self._node, self._runs_graph = outside

    def ran_below_autograd(self, results: Any) -> None:
        """A graph has run whose results get their autograd node, one for all, after this."""
        self._nodes.returned(results)

    def _set_node(self, node: torch.fx.Node) -> None:
        self._node = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Save an operator and run it."""
        kwargs = kwargs or {}
        if self._is_saved_further_in() or not switch.on or _torch_private.is_tracing():
            return func(*args, **kwargs)
        if any(map(_torch_private.has_own_dispatch, types)):
            self.is_taken_apart(types, (args, kwargs))
            return NotImplemented  # The operators that it makes of this one come here next.
        self._nodes.look()
        if not _runs_here(func) or not self.wants(func, args):
            with writes_of(func, args, kwargs):
                return func(*args, **kwargs)
        kernel = _torch_private.composite_kernel(func)
        if kernel is not None:
            with _torch_private.mode_pushed(self):
                return kernel(*args, **kwargs)
        return self._save(func, args, kwargs)

    def _is_saved_further_in(self) -> bool:
        """Whether an operator came here through a mode that has saved it.

        A scope that has been opened since, by an operator written in Python, is for itself.
        """
        saved_by = _thread.saved_by
        return saved_by is not None and self._number < saved_by._number

    def wants(self, func: OperatorBase, args: tuple[Any, ...]) -> bool:
        """Whether an operator that runs now is saved."""
        return True

    def is_taken_apart(self, types: Any, arguments: Any) -> None:
        """Is told of an operator on tensors that make others of it, as DTensors do."""

    def origin(self) -> Origin:
        """Where an operator that runs now comes from."""
        if self._node is None:
            return Origin(self.tag, source_here(), module_here())
        inner = tag_of(self._node)
        tag = inner._replace(scope=f"{self.tag.scope}/{inner.scope}") if inner else self.tag
        # Torch compiles `cond` and its like on their own: their graphs do not know the model.
        module = module_of(self._node) if self._runs_graph else module_here()
        return Origin(tag, source_of(self._node) or source_here(), module)

    def facts(self) -> dict[str, Any]:
        """What the record of a call says beyond its origin."""
        return {}

    def computed(self, results: Any) -> None:
        """Is told what a saved operator returned."""

    def _save(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running, origin = Running(func, args, kwargs, self._names), self.origin()
        has_bodies = isinstance(func, HigherOrderOperator)
        with _torch_private.modes_disabled():
            call, place = self._begin(running, origin)
        self._nodes.before((args, kwargs))
        given = tuple(watched_bodies(func, args, place, self._in_body)) if has_bodies else args
        results = self._run(func, given, kwargs)
        if call is not None:
            with _torch_private.modes_disabled():
                call.sink.finish(results, mutated_arguments(func, args, kwargs))
            self._nodes.after(results, (origin, call))
            self.computed(results)
        elif has_bodies:
            self._nodes.returned(results)  # One autograd node stands for all that ran.
        return results

    def _begin(self, running: Running, origin: Origin) -> tuple[EagerCall | None, str]:
        """Save an operator's inputs, and give what the names in its bodies begin with."""
        options = self.settings.options_of(origin.tag)
        step = self.entry.step(options)
        skipped = step.skips(origin, options)
        if skipped and not isinstance(running.operator, HigherOrderOperator):
            return None, ""
        node = step.node(running, origin)
        place = step.place(running, node)
        if skipped:
            return None, place
        asked = (options, self.settings.filter)
        return step.begin_call(running, node, origin, self.facts(), asked), place

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, which outer scopes are not to save once more."""
        outside, _thread.saved_by = _thread.saved_by, self
        try:
            with writes_of(func, args, kwargs):
                return func(*args, **kwargs)
        finally:
            _thread.saved_by = outside

    @contextlib.contextmanager
    def _in_body(self, place: str) -> Iterator[Callable[[torch.fx.Node], None]]:
        """Save what a body runs; yields what to tell its node."""
        outside = self._names, self._node
        self._names = Names(place)
        try:
            with _torch_private.mode_pushed(self):
                yield self._set_node
        finally:
            self._names, self._node = outside

    def _save_runs_of(self, node: Any, made_by: tuple[Origin, EagerCall]) -> None:
        """Have the backward of an operator saved, whenever its autograd node runs."""
        entry, settings = self.entry, self.settings

        def before(gradients: Any) -> None:
            if switch.on:
                _GradientMode(entry, settings, *made_by).open()

        node.register_prehook(before)
        node.register_hook(_node_has_run)


class _ScopeMode(SavingMode):  # type: ignore[no-untyped-call]
    """A scope of the user's, from its entry until it is left."""

    def __init__(self, name: str | None, options: Options) -> None:
        position, outer = opened_at(), open_mode()
        inner = name or position
        within = outer if isinstance(outer, _ScopeMode) else None
        tag = Tag(f"{within.tag.scope}/{inner}" if within else inner, position)
        self._compile = uncompiled.enclosing_compile()
        self._is_open = True
        options = options.of_scope(tag.scope)
        if within is not None:
            options = options.over(within.options)
        settings = within.settings if within else DumpSettings()
        if self._compile and self._compile.settings:
            settings = self._compile.settings
        settings = settings.within(options)
        reason = self._compile.reason if self._compile else None
        entry = within.entry if within else Entry(tag, reason)
        super().__init__(entry, tag, settings, outer)
        self.options = options
        account.opened(tag)
        if reason is not None:
            account.uncompiled(tag, reason)
        self._compiling: Any = None
        self._has_lost_gradients = False
        self._facts: dict[str, Any] = {"recompute": True} if is_recomputing() else {}
        self._in_transform = _torch_private.is_in_gradient_transform()
        if self._in_transform and (within is None or within._in_transform):
            uncompiled.warn_of_gradients(tag, settings)
        if self._compile and not (within and self._compile.is_same_call_as(within._compile)):
            uncompiled.warn(self._compile, tag, settings)

    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        if self.outer is not None:
            self.outer._nodes.look()
        watch_compiled_calls(_sees_calls)
        self.entry.enter()
        super().open()

    def close(self) -> None:
        """Take the mode off this thread's stack."""
        _torch_private.remove_mode(self)
        self._is_open = False
        if open_mode() is None:
            outermost_scope_is_left()
        self._nodes.look()
        self.entry.leave()

    def is_taken_apart(self, types: Any, arguments: Any) -> None:
        differentiated = any(tensor.requires_grad for tensor in tensors_in(arguments))
        if differentiated and torch.is_grad_enabled() and not self._has_lost_gradients:
            self._has_lost_gradients = True
            uncompiled.warn_of_subclass(self.tag, self.settings, types)

    def callback_within(self, compiling: Any) -> Any:
        """What Dynamo is to do in the scope, where it compiled what was called before.

        In a frame that it has left to Python it goes on to compile what is called. Of what
        another backend makes of that, the scope would see nothing.
        """
        if self._compile is None or not self._compile.hides_operators:
            return compiling
        self._compiling = compiling
        return None

    def callback_after(self, compiling: Any) -> Any:
        """What Dynamo is to do after the scope: what it did before, in the same call."""
        if self._compiling is not None and uncompiled.is_in_call(self._compile):
            return self._compiling
        return compiling

    def facts(self) -> dict[str, Any]:
        return self._facts


class _GradientMode(SavingMode):  # type: ignore[no-untyped-call]
    """One run of an autograd node that was made in a scope.

    The engine puts the stack of modes back after each node, whatever happens. So the mode may
    stay there when the node has run, and see how the node's gradients are summed with others.
    """

    def __init__(
        self, entry: Entry, settings: DumpSettings, origin: Origin, forward: EagerCall
    ) -> None:
        super().__init__(entry, origin.tag, settings, open_mode())
        self._origin = origin
        self._forward = forward
        self._backward = _torch_private.running_backward()
        self._step = entry.step(settings.options_of(origin.tag))
        self.node_has_run = False

    def is_open(self) -> bool:
        return not self.node_has_run and self._backward == _torch_private.running_backward()

    def wants(self, func: OperatorBase, args: tuple[Any, ...]) -> bool:
        """A sum belongs to the scope if all that it joins was computed in it."""
        if self._backward != _torch_private.running_backward():
            return False  # a backward that runs within this one
        if not self.node_has_run:
            return True
        return func in _SUMS and all(map(self._step.has_computed, tensors_in(args)))

    def origin(self) -> Origin:
        return self._origin

    def facts(self) -> dict[str, Any]:
        return {} if self.node_has_run else {"forward": self._forward.place()}

    def computed(self, results: Any) -> None:
        self._step.remember(tensors_in(results))

    def end_of_node(self) -> None:
        """The node has run; what comes now are sums."""
        self.node_has_run = True
        open_mode()
        self._nodes.look()


def _runs_here(func: Any) -> bool:
    """Whether an operator computes something, and does not have others of its kind do it."""
    if isinstance(func, HigherOrderOperator):
        return _torch_private.runs_bodies(func)
    return isinstance(func, OpOverload)


def _node_has_run(gradients: Any, incoming: Any) -> None:
    mode = _torch_private.top_mode()
    if isinstance(mode, _GradientMode):
        mode.end_of_node()


_torch_private.skip_frames(SavingMode.__torch_dispatch__)
_torch_private.skip_frames(_node_has_run)
_torch_private.skip_frames(EagerScope.__enter__, sets_callback=True)
_torch_private.skip_frames(EagerScope.__exit__, sets_callback=True)
