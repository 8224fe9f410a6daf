"""A scope around a call that another backend has compiled: that call runs uncompiled.

Nothing of the scope can be seen inside of code that another compiler has made. So, while a scope
is open on the calling thread, the function runs as Python, as it would under
`torch.compiler.set_stance("force_eager")`, and its operators pass through the scope. Nothing is
compiled again, and calls outside of a scope, or on other threads, are what they were.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

from torchair_scope import _torch_private
from torchair_scope.capture.settings import SETTINGS

Question = Callable[[], bool]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.left_to_python: set[int] = set()


_thread = _Thread()


@functools.cache
def watch_compiled_calls(in_a_scope: Question) -> None:
    """Leave compiled calls in scopes to Python from now on; torch is untouched before.

    Args:
        in_a_scope: whether a scope is open on the thread that asks.
    """
    _torch_private.ask_before_compiled_calls(in_a_scope, _leave_to_python)


def _leave_to_python(frame: types.FrameType, backend: Any) -> bool:
    # An id may be that of a frame that is gone, until it is taken again.
    _thread.left_to_python.discard(id(frame))
    if not hides_operators(backend):
        return False
    _thread.left_to_python.add(id(frame))
    return True


def hides_operators(backend: Any) -> bool:
    """Whether a scope around a call that a backend has compiled would see nothing of it."""
    return not hasattr(backend, SETTINGS) and not _torch_private.runs_graphs_in_python(backend)


def is_left_to_python(frame: types.FrameType) -> bool:
    """Whether a frame of a compiled call runs uncompiled for the sake of a scope around it."""
    return id(frame) in _thread.left_to_python


def outermost_scope_is_left() -> None:
    """No scope is open on this thread any more."""
    _thread.left_to_python.clear()
