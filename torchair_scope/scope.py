"""Scopes: what a user writes to say which operators are dumped.

    with torchair.scope.data_dump("mlp"):
        y = self.mlp(h)

    @torchair.dump_ops
    def rope(q, cos, sin): ...

A scope puts a tag on the operators that are traced inside it, and knows nothing of compilers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch.fx.traceback import annotate

from torchair_scope import _torch_private, switch
from torchair_scope.capture.account import Row, Summary, account
from torchair_scope.capture.account_at_exit import summary
from torchair_scope.capture.eager import EagerScope
from torchair_scope.capture.frames import opened_at
from torchair_scope.capture.tags import KEY, Tag, tag_in
from torchair_scope.options import (
    NONE,
    Configured,
    Options,
    key_of,
    options_of,
    options_with_key,
    set_defaults,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torchair_scope.options import GivenOptions

__all__ = [
    "Row",
    "Summary",
    "configure",
    "data_dump",
    "disable",
    "disabled",
    "dump_ops",
    "enable",
    "remove_dump_ops",
    "summary",
]

_Target = TypeVar("_Target")


def data_dump(
    name: str | None = None, **options: Unpack[GivenOptions]
) -> AbstractContextManager[None]:
    """Dump the operators that are born inside the `with` block of compiled code.

        >>> import torch, torchair_scope as torchair
        >>> @torch.compile(backend="torchair_scope", options={"path": "./dump"})
        ... def f(x):
        ...     with torchair.scope.data_dump("shift"):
        ...         y = x + 1
        ...     return y * 2
        >>> f(torch.ones(3))
        tensor([4., 4., 4.])

    Here `aten.add.Tensor` is run on its own and its inputs and outputs are saved, and
    `aten.mul.Tensor` is compiled. The operators that a scope's operators give rise to in the
    backward graph are dumped as well. Scopes nest: a scope "b" inside a scope "a" is "a/b".

    Args:
        name: how the scope is called in the dump; the file and line of the `with`, as
            `model.py:12`, if it has none.
        mode: "all", or "input" or "output" to save only what operators are given or return.
        steps: which steps are dumped, "0|3-5|10" in the syntax of TorchAir's `dump_step`, or a
            number, a set or a range. A step is one run of one graph, or one entry of an outermost
            scope in eager code, counted from 0. Others leave no file and no record. The backward
            of a compiled graph counts its own runs; that of eager code follows the forward.
        ranks: which ranks of a distributed job dump, written as `steps` are.
        ops: which operators are dumped: a pattern that targets are compared with, as "aten.mm*",
            or a predicate that is called with the `torch.fx.Node`. It is asked when a graph is
            compiled, and what it does not want is compiled; in eager code it is asked each time.
        path: the dump folder; made absolute here. In code that is traced, a str, or a Path that is
            made outside of it.
        on_error: "warn" once if a dump cannot be written, and go on, or "raise".
        engine: how values are obtained when a graph is compiled. "interpret" runs the operators
            one by one; "tap" compiles them with all else, and has the compiled code return their
            values. In code that is not compiled there is no difference.
        tap: what engine "tap" takes: "all" values, or those at the "boundary" of the scope only.
        lag: 0 if a step's files are to be there when its graph's run returns, or 1 if it is
            enough that they are when the next run returns. If scopes of one graph differ in it, 0.
        max_inflight: how many bytes of this process may wait to be written, 1 GiB by default;
            past it, the step waits. A number of bytes, or a string as "2GiB", as for all sizes.
        data: "tensors"; or "stats" to save no tensors, but a row of statistics for each in
            `stats.csv`; or "both".
        sample: which part of each tensor is saved: `{"head": 1000}` the first thousand elements of
            one that has more, `(slice(2), slice(None, None, 4))` slices of the dimensions, from
            the first on, of one that has as many.
        max_bytes: how many bytes of files may be written for this scope, those in it included.
            What follows once they are reached degrades to statistics. Given to `configure` or in
            the environment, it holds for the whole process, beside those of scopes.
        max_calls: of how many calls tensors may be saved, likewise.
        min_free: how many bytes of the disk stay free, 1 GiB by default; what follows degrades to
            statistics.
        when: "nonfinite" saves a step of the scope only if one of its tensors holds NaN or Inf;
            "nonfinite:first" the first such step, and none after it; a predicate, called with each
            tensor, those for which it is true of one. A scope and those in it are one.
        keep_last: how many steps of each graph are kept in memory and saved when `when` comes
            true, before the one in which it does; 0 by default.
        max_held: how many bytes of this process may be held in memory for `when`, 4 GiB by
            default; past it, the oldest steps are let go, and then tensors.

    An option that is not given here is that of the scope around this one, of the backend, of
    `configure`, or of the environment variable `TORCHAIR_SCOPE_MODE`, `_STEPS` and so on.

    Raises:
        TypeError: `name` is neither a string nor None, there is no such option, or its value is
            of a wrong type.
        ValueError: an option cannot have this value.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a scope's name is a string or None, got {name!r}")
    if not switch.on:
        return contextlib.nullcontext()
    if torch.compiler.is_dynamo_compiling():
        return annotate({KEY: _open_scope(name, **_specialized(options))})
    if _torch_private.is_recorded():
        return _torch_private.annotating({KEY: _open_scope(name, **options)})
    return EagerScope(name, options_of(options, "data_dump") if options else NONE)


def _scope_with_key(name: str, key: str) -> AbstractContextManager[None]:
    """The same for options that are known by their key: only constants can be traced."""
    if not switch.on:
        return contextlib.nullcontext()
    if torch.compiler.is_dynamo_compiling():
        return annotate({KEY: _open_scope_with_key(name, key)})
    if _torch_private.is_recorded():
        return _torch_private.annotating({KEY: _open_scope_with_key(name, key)})
    return EagerScope(name, options_with_key(key))


_torch_private.skip_frames(data_dump)
_torch_private.skip_frames(_scope_with_key)


def _specialized(value: Any) -> Any:
    """The same value, of which Dynamo traces nothing as a variable; it recompiles for another one.

    An int that it has seen change is one, and that could not be made a constant of the trace.
    """
    if type(value) is int:
        return operator.index(value)
    if type(value) is dict:
        return {key: _specialized(member) for key, member in value.items()}
    if type(value) is slice:
        return slice(*map(_specialized, (value.start, value.stop, value.step)))
    if type(value) in (list, tuple):
        return type(value)(map(_specialized, value))
    return value


@_torch_private.constant_of_trace
def _open_scope(name: str | None, **options: Any) -> tuple[str, str, str]:
    """The tag for a scope opened here. Dynamo runs this while it traces, and keeps the result."""
    try:
        checked = options_of(options, "data_dump")
    except (TypeError, ValueError) as error:
        if _torch_private.user_frames_of_trace():
            raise _torch_private.as_error_of_trace(error) from None
        raise
    return _opened(name, checked)


@_torch_private.constant_of_trace
def _open_scope_with_key(name: str, key: str) -> tuple[str, str, str]:
    return _opened(name, options_with_key(key))


def _opened(name: str | None, options: Options) -> tuple[str, str, str]:
    position = opened_at()
    outer = tag_in(_torch_private.enclosing_annotations())
    inner = name or position
    if outer is not None:
        inner = f"{outer.scope}/{inner}"
    options = options.of_scope(inner)
    if outer is not None:
        options = options.over(options_with_key(outer.options))
    tag = Tag(inner, position, key_of(options))
    account.opened_in_trace(tag)
    return tag.scope, tag.opened_at, tag.options


def configure(**options: Unpack[GivenOptions]) -> Configured:
    """Set the options that scopes of this process have by default; see `data_dump`.

        >>> import torchair_scope as torchair
        >>> with torchair.scope.configure(steps="0-2", mode="output"):
        ...     pass  # the code that runs the model
        >>> configured = torchair.scope.configure(on_error="warn")  # from here on

    They are looked up at each step, but for `ops`, which is looked up when a graph is compiled.

    Args:
        options: those of `data_dump`; None takes a default away again.

    Returns:
        What puts the defaults back as they were when a `with` block around it ends.

    Raises:
        TypeError: there is no such option, or its value is of a wrong type.
        ValueError: an option cannot have this value.
    """
    return set_defaults(options)


def disable() -> None:
    """Switch all scopes of this process off, as the environment variable TORCHAIR_SCOPE=0 does.

        >>> import torchair_scope as torchair
        >>> torchair.scope.disable()
        >>> torchair.scope.enable()

    A scope then does nothing: it puts no tag on a graph, which is so the plain one, and dumps
    nothing in eager code. A compiled function that has a scope in it is compiled once more.
    """
    switch.on = False


def enable() -> None:
    """Switch the scopes of this process on again after `disable` or TORCHAIR_SCOPE=0."""
    switch.on = True


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Switch all scopes of this process off inside the `with` block.

    >>> import torch, torchair_scope as torchair
    >>> with torchair.scope.disabled(), torchair.scope.data_dump():
    ...     y = torch.ones(3) + 1
    """
    before, switch.on = switch.on, False
    try:
        yield
    finally:
        switch.on = before


@overload
def dump_ops(
    target: _Target, *, name: str | None = None, **options: Unpack[GivenOptions]
) -> _Target: ...
@overload
def dump_ops(
    target: None = None, *, name: str | None = None, **options: Unpack[GivenOptions]
) -> Callable[[_Target], _Target]: ...
def dump_ops(
    target: Any = None, *, name: str | None = None, **options: Unpack[GivenOptions]
) -> Any:
    """Dump the operators of a function, a method, an `nn.Module` class or a live module.

        >>> import torch, torchair_scope as torchair
        >>> @torchair.dump_ops
        ... def shift(x):
        ...     return x + 1
        >>> layer = torchair.dump_ops(torch.nn.Linear(4, 4), name="projection")
        >>> layer = torchair.remove_dump_ops(layer)

    It is the same as a `data_dump(name)` around the body. A decorated function keeps its name,
    docstring, signature and binding, and a live module its class, its `state_dict` keys, and its
    being copied and pickled.

    Args:
        target: a function, a method (static, class and instance methods), an `nn.Module` class
            (the scope is then around its `forward`, and that of subclasses which do not override
            it) or an `nn.Module` (only that one module). Without it, a decorator is returned.
        name: how the scope is called in the dump; the qualified name of what is decorated, for a
            module that of its class, if it has none.
        options: those of `data_dump`: mode, steps, ranks, ops, path, on_error and so on.

    Returns:
        What takes the place of `target`: a function of the same kind; a class or module is
        changed where it is, and returned.

    Raises:
        TypeError: `target` is nothing that has operators of its own, `name` is no string, there
            is no such option, or its value is of a wrong type.
        ValueError: an option cannot have this value.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a scope's name is a string or None, got {name!r}")
    checked = options_of(options, "dump_ops")
    if target is None:
        return functools.partial(dump_ops, name=name, **options)
    if isinstance(target, torch.nn.Module):
        return _scope_module(target, name, checked)
    if isinstance(target, type):
        return _scope_module_class(target, name, checked)
    if isinstance(target, (staticmethod, classmethod, types.MethodType)):
        return _rebound(target, _scoped(target.__func__, name, checked))
    if callable(target):
        return _scoped(target, name, checked)
    raise TypeError(
        "dump_ops takes a function, a method, an nn.Module class or an nn.Module, "
        f"got {target!r} of type {type(target).__name__}"
    )


def remove_dump_ops(target: _Target) -> _Target:
    """Undo `dump_ops` on a live module, an `nn.Module` class or a function.

        >>> import torch, torchair_scope as torchair
        >>> layer = torchair.dump_ops(torch.nn.Linear(4, 4))
        >>> "forward" in torchair.remove_dump_ops(layer).__dict__
        False

    Returns:
        The module or class, changed where it is, or the function that was decorated.

    Raises:
        ValueError: `dump_ops` was not applied to `target`.
    """
    undecorated: Any = None
    if isinstance(target, torch.nn.Module):
        scoped = _uncompiled(target).__dict__.get("forward")
        if isinstance(scoped, _ScopedForward):
            scoped.remove()
            undecorated = target
    elif isinstance(target, type):
        if _is_scoped(vars(target).get("forward")):
            _set_forward(target, vars(target)["forward"].__wrapped__)
            undecorated = target
    elif isinstance(target, (staticmethod, classmethod, types.MethodType)):
        if _is_scoped(target.__func__):
            undecorated = _rebound(target, _original(target.__func__))
    elif _is_scoped(target):
        undecorated = _original(target)
    if undecorated is None:
        raise ValueError(f"dump_ops was not applied to {target!r}: there is nothing to remove")
    return cast(_Target, undecorated)


def _rebound(descriptor: Any, function: Callable[..., Any]) -> Any:
    """`function` bound as `descriptor` is: a static, class or bound method."""
    if isinstance(descriptor, types.MethodType):
        return types.MethodType(function, descriptor.__self__)
    return type(descriptor)(function)


def _original(scoped: Any) -> Any:
    return scoped.__wrapped__


def _scoped(function: Callable[..., Any], name: str | None, options: Options) -> Callable[..., Any]:
    """`function` with a scope around its body.

    The wrapper is a plain function whose own code opens the scope: Dynamo looks through a wrapt
    FunctionWrapper to what it wraps, and the scope would be lost without a word.
    """
    own_name: str = getattr(function, "__qualname__", type(function).__name__)
    scope_name = name or own_name
    key = key_of(options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _scope_with_key(scope_name, key):
            return function(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with _scope_with_key(scope_name, key):
            return await function(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        with _scope_with_key(scope_name, key):
            return (yield from function(*args, **kwargs))

    wrapper: Callable[..., Any] = call
    if inspect.iscoroutinefunction(function):
        wrapper = coroutine
    elif inspect.isgeneratorfunction(function):
        wrapper = generator
    scoped = functools.wraps(function)(_with_own_code(wrapper))
    scoped.__torchair_scope__ = scope_name  # type: ignore[attr-defined]
    return scoped


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Dynamo counts recompiles by code object. If all decorated functions shared one, the ninth of
    them would run uncompiled.
    """
    return types.FunctionType(
        function.__code__.replace(co_name=function.__code__.co_name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _is_scoped(function: Any) -> bool:
    return "__torchair_scope__" in getattr(function, "__dict__", {})


def _scope_module_class(cls: type, name: str | None, options: Options) -> type:
    if not issubclass(cls, torch.nn.Module):
        raise TypeError(
            f"dump_ops takes nn.Module classes, and {cls.__qualname__} is none. "
            "Decorate the methods whose operators are to be dumped."
        )
    _set_forward(cls, _scoped(cls.forward, name or cls.__qualname__, options))
    return cls


def _set_forward(cls: type, forward: Callable[..., Any]) -> None:
    cls.forward = forward  # type: ignore[attr-defined]


def _scope_module(module: torch.nn.Module, name: str | None, options: Options) -> torch.nn.Module:
    inner = _uncompiled(module)
    scoped = _new_scoped_forward()
    scoped.__init__(inner, name or type(inner).__qualname__, options)  # type: ignore[misc]
    inner.forward = scoped
    return module


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, _torch_private.optimized_module_type()):
        return cast(torch.nn.Module, module._orig_mod)
    return module


_OF_A_METHOD = (
    *("__code__", "__func__", "__self__", "__name__", "__qualname__", "__globals__"),
    *("__defaults__", "__kwdefaults__", "__annotations__", "__closure__"),
)


class _ScopedForward:
    """Stands in a live module's `__dict__` as its `forward`, with a scope around the real one.

    An object and not a closure, so that it is copied and pickled with its module; each is of a
    class of its own, for the sake of `_with_own_code`.
    """

    def __init__(self, module: torch.nn.Module, name: str, options: Options) -> None:
        self.module = module
        self.name = name
        self.options = options
        self.key = key_of(options)
        self.own_forward = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _scope_with_key(self.name, self.key):
            if self.own_forward is not None:
                return self.own_forward(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_scoped_forward, (), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A key is one of this process.
        self.__dict__.update(state, key=key_of(state["options"]))

    def __getattr__(self, name: str) -> Any:
        # What a bound method has, and torch.export and others ask a `forward` for.
        if name not in _OF_A_METHOD or "module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    @property
    def __wrapped__(self) -> Any:
        if self.own_forward is not None:
            return self.own_forward
        return types.MethodType(type(self.module).forward, self.module)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self.__wrapped__)

    def remove(self) -> None:
        """Give the module its own `forward` back."""
        if self.own_forward is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own_forward


def _new_scoped_forward() -> _ScopedForward:
    own = {"__call__": _with_own_code(_ScopedForward.__call__)}
    cls = type(_ScopedForward.__name__, (_ScopedForward,), {**_ScopedForward.__dict__, **own})
    return cast(_ScopedForward, object.__new__(cls))
