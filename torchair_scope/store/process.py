"""The number of this process, which is asked for with each file: without a call of the system."""

from __future__ import annotations

import os

_number = os.getpid()


def number() -> int:
    """The number of this process, also in a forked child."""
    return _number


def _renew() -> None:
    global _number
    _number = os.getpid()


os.register_at_fork(after_in_child=_renew)
