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
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast, overload

import torch
from torch.fx.traceback import annotate

from torchair_scope import _torch_private, switch
from torchair_scope.capture.eager import EagerScope
from torchair_scope.capture.frames import opened_at
from torchair_scope.capture.tags import KEY, tag_in

__all__ = ["data_dump", "disable", "disabled", "dump_ops", "enable", "remove_dump_ops"]

_Target = TypeVar("_Target")


def data_dump(name: str | None = None) -> AbstractContextManager[None]:
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

    Raises:
        TypeError: `name` is neither a string nor None.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a scope's name is a string or None, got {name!r}")
    if not switch.on:
        return contextlib.nullcontext()
    if torch.compiler.is_dynamo_compiling():
        return annotate({KEY: _open_scope(name)})
    if _torch_private.is_recorded():
        return _torch_private.annotating({KEY: _open_scope(name)})
    return EagerScope(name)


_torch_private.skip_frames(data_dump)


@_torch_private.constant_of_trace
def _open_scope(name: str | None) -> tuple[str, str]:
    """The tag for a scope opened here. Dynamo runs this while it traces, and keeps the result."""
    position = opened_at()
    outer = tag_in(_torch_private.enclosing_annotations())
    inner = name or position
    return (f"{outer.scope}/{inner}" if outer else inner, position)


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
def dump_ops(target: _Target, *, name: str | None = None) -> _Target: ...
@overload
def dump_ops(target: None = None, *, name: str | None = None) -> Callable[[_Target], _Target]: ...
def dump_ops(target: Any = None, *, name: str | None = None) -> Any:
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

    Returns:
        What takes the place of `target`: a function of the same kind; a class or module is
        changed where it is, and returned.

    Raises:
        TypeError: `target` is nothing that has operators of its own, or `name` is no string.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a scope's name is a string or None, got {name!r}")
    if target is None:
        return functools.partial(dump_ops, name=name)
    if isinstance(target, torch.nn.Module):
        return _scope_module(target, name)
    if isinstance(target, type):
        return _scope_module_class(target, name)
    if isinstance(target, (staticmethod, classmethod, types.MethodType)):
        return _rebound(target, _scoped(target.__func__, name))
    if callable(target):
        return _scoped(target, name)
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


def _scoped(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """`function` with a scope around its body.

    The wrapper is a plain function whose own code opens the scope: Dynamo looks through a wrapt
    FunctionWrapper to what it wraps, and the scope would be lost without a word.
    """
    scope_name = name or getattr(function, "__qualname__", type(function).__name__)

    def call(*args: Any, **kwargs: Any) -> Any:
        with data_dump(scope_name):
            return function(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with data_dump(scope_name):
            return await function(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        with data_dump(scope_name):
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


def _scope_module_class(cls: type, name: str | None) -> type:
    if not issubclass(cls, torch.nn.Module):
        raise TypeError(
            f"dump_ops takes nn.Module classes, and {cls.__qualname__} is none. "
            "Decorate the methods whose operators are to be dumped."
        )
    _set_forward(cls, _scoped(cls.forward, name or cls.__qualname__))
    return cls


def _set_forward(cls: type, forward: Callable[..., Any]) -> None:
    cls.forward = forward  # type: ignore[attr-defined]


def _scope_module(module: torch.nn.Module, name: str | None) -> torch.nn.Module:
    inner = _uncompiled(module)
    scoped = _new_scoped_forward()
    scoped.__init__(inner, name or type(inner).__qualname__)  # type: ignore[misc]
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

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.own_forward = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with data_dump(self.name):
            if self.own_forward is not None:
                return self.own_forward(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_scoped_forward, (), self.__dict__

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
