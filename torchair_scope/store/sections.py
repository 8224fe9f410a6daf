"""Stretches of the store's code that nothing else of the store may run in the middle of.

A signal handler and a finaliser run between any two lines of a thread, one that holds a lock
perhaps, or that a writer waits for. So both look here first, and are put off if need be.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Callable
from typing import Any


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


class _Section:
    """A stretch of the store's code on this thread; they nest."""

    def __enter__(self) -> None:
        _thread.depth += 1

    def __exit__(self, *exc_info: object) -> None:
        _thread.depth -= 1
        if _put_off and not _thread.depth and threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), _put_off.pop())


section = _Section()
_put_off: list[int] = []


def in_section() -> bool:
    """Whether this thread is in the middle of a section."""
    return _thread.depth > 0


_previous: Any = None
_installed_by: int | None = None


def settle_before_termination(settle: Callable[[], None]) -> None:
    """Have `settle` called when SIGTERM comes, before what the signal does without us.

    A handler that stands is called after it, and the default one ends the process by the signal.
    Only the main thread may install a handler; on others this does nothing, and an ignored
    SIGTERM stays ignored.
    """
    global _previous, _installed_by
    if threading.current_thread() is not threading.main_thread() or _installed_by == os.getpid():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_IGN or handler is None:
        return
    if not isinstance(handler, _Terminated):  # which a forked child has of its parent
        _previous = handler
    signal.signal(signal.SIGTERM, _Terminated(settle))
    _installed_by = os.getpid()


class _Terminated:
    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        if in_section():
            _put_off.append(number)
            return
        if _installed_by == os.getpid():
            self._settle()
        if callable(_previous):
            _previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _forget() -> None:
    _put_off.clear()
    _thread.depth = 0


os.register_at_fork(after_in_child=_forget)
