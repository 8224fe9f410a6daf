"""The steps of a rank folder that are not complete on disk."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchair_scope.store.pool import pool

if TYPE_CHECKING:
    from torchair_scope.store.writer import Step


class OpenSteps:
    """Steps from their beginning until they are complete."""

    def __init__(self) -> None:
        self._begun: set[Step] = set()
        self._returned: list[Step] = []
        self._lock = threading.RLock()

    def begins(self, step: Step) -> None:
        """A graph begins to run."""
        with self._lock:
            self._begun.add(step)

    def has_returned(self, step: Step) -> None:
        """A graph has returned; its step will be completed by `complete`."""
        with self._lock:
            self._returned.append(step)

    def complete(self) -> None:
        """Complete the steps whose graphs have returned, in this order.

        **Raises:** what the completion of one raises; those behind it wait for the next time.
        """
        while True:
            with self._lock:
                if not self._returned:
                    return
                step = self._returned.pop(0)
                self._begun.discard(step)
            step.complete()

    def settle(self) -> None:
        """Write what is handed over, and record what is known; the steps stay open."""
        pool().wait_for_all()
        with self._lock:
            begun = list(self._begun)
        for step in begun:
            step.flush()
