"""Code of a graph that is compiled when it is first needed: when the graph runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from torchair_scope import _torch_private
from torchair_scope.capture.cut import is_captured

_Code = TypeVar("_Code")


class OnDemand(Generic[_Code]):
    """Code that may be compiled later. Make it while its graph is compiled.

    Args:
        compile: makes the code.
        failed: is told why it cannot be made later, if it cannot.
    """

    def __init__(self, compile: Callable[[], _Code], failed: Callable[[Exception], None]) -> None:
        self._later = _torch_private.LaterCompile()
        self._compile: Callable[[], _Code] | None = compile
        self._failed = failed
        self._code: _Code | None = None
        self._lock = threading.Lock()

    def give(self, code: _Code | None) -> None:
        """Take code that was compiled with the rest of the graph; None if there is none."""
        self._code, self._compile = code, None

    def get(self) -> _Code | None:
        """The code, which is compiled now if it was not yet; None if it cannot be."""
        if self._compile is None:
            return self._code
        if is_captured():
            return None  # A compiler does on the device what cannot be captured.
        with self._lock:
            if self._compile is not None:
                self._make(self._compile)
        return self._code

    def _make(self, compile: Callable[[], _Code]) -> None:
        try:
            self._code = self._later(compile)
        except Exception as error:
            # No step may fail for the code that it would do better with.
            self._failed(error)
        finally:
            self._compile = None
