"""How much may be saved: limits of scopes and of the process, and a floor of free disk space.

Once one of them is reached, only statistics are saved of what follows.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchair_scope.options import Limit
from torchair_scope.sizes import as_text
from torchair_scope.store.pool import pool

if TYPE_CHECKING:
    from torchair_scope.store.run import RankFolder

# How long the free space is taken to be known: for small files, and for all if so much is to spare
# that others do not fill it in this time.
_SECONDS_KNOWN = 0.05
_SMALL = 1 << 20
_PLENTY = 1 << 30
# What the reasons begin with, as the account tells them.
BUDGET, DISK = "budget", "disk"


class Usage:
    """What was saved for one scope, or by the process, so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self.under_way = 0
        self.calls = 0
        self.reached: dict[Limit, str] = {}


_usages: defaultdict[str | None, Usage] = defaultdict(Usage)
_lock = threading.Lock()


class Reservation:
    """Bytes that are to be written; what was written of them is said once it is known."""

    def __init__(self, limits: tuple[Limit, ...], size: int) -> None:
        self._usages = [_usages[limit.scope] for limit in limits]
        self._size = size
        for usage in self._usages:
            usage.under_way += size

    def settle(self, written: int) -> None:
        """Say how many bytes had to be written: none for a value that was on disk."""
        with _lock:
            for usage in self._usages:
                usage.under_way -= self._size
                usage.bytes += written
            self._usages.clear()


class Disk:
    """The free space of a disk, which is not looked up for each file.

    Args:
        room: looks it up.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._free = 0
        self._until = 0.0

    def has_room(self, size: int, floor: int) -> bool:
        """Whether `floor` bytes stay free if so many more are written; then they count as such."""
        spare = self._free - size - floor
        if spare < 0 or time.monotonic() > self._until or (size > _SMALL and spare < _PLENTY):
            self._free = self._room() - pool().in_flight()
            self._until = time.monotonic() + _SECONDS_KNOWN
        if self._free - size < floor:
            return False
        self._free -= size
        return True


NOTHING_TO_SETTLE = Reservation((), 0)


class Budget:
    """What may be saved of a scope in one dump.

    Args:
        limits: those that hold for it.
        min_free: bytes of the disk that stay free.
        folder: where it is dumped.

    Attributes:
        limits: those of them that bound anything.
    """

    def __init__(self, limits: tuple[Limit, ...], min_free: int, folder: RankFolder) -> None:
        self.limits = tuple(limit for limit in limits if limit[1:] != (None, None))
        self._min_free = min_free
        self._folder = folder

    def begin_call(self) -> str | None:
        """Why tensors of one more call are not to be saved; None if they are."""
        with _lock:
            for limit in self.limits:
                usage = _usages[limit.scope]
                if limit.max_calls is not None and usage.calls >= limit.max_calls:
                    _reach(limit, f"max_calls={limit.max_calls}")
                if limit in usage.reached:
                    return usage.reached[limit]
            for limit in self.limits:
                _usages[limit.scope].calls += 1
        return None

    def reserve(self, size: int) -> Reservation | str:
        """Make room for so many bytes; the reason if there is none."""
        if self._min_free and not self._folder.disk.has_room(size, self._min_free):
            least = as_text(self._min_free)
            return f"{DISK}: less than {least} of it would be free, see the option min_free"
        if not self.limits:
            return NOTHING_TO_SETTLE
        if self._exceeds(size, settled=False):
            # What is under way may be on disk already.
            pool().wait_for_all()
            if reason := self._exceeds(size, settled=True):
                return reason
        with _lock:
            return Reservation(self.limits, size)

    def _exceeds(self, size: int, *, settled: bool) -> str | None:
        with _lock:
            for limit in self.limits:
                usage = _usages[limit.scope]
                if limit in usage.reached:
                    return usage.reached[limit]
                most = limit.max_bytes
                if most is not None and usage.bytes + usage.under_way + size > most:
                    reason = f"max_bytes={as_text(most)}"
                    return _reach(limit, reason) if settled else reason
        return None


def _reach(limit: Limit, what: str) -> str:
    of = "the process" if limit.scope is None else f"scope {limit.scope!r}"
    return _usages[limit.scope].reached.setdefault(limit, f"{BUDGET}: {what} of {of} is reached")


def _unlock() -> None:
    """A forked child's copy of the lock may be held by no one."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
