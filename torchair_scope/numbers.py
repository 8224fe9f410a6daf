"""Sets of step or rank numbers, as a user writes them: "0|3-5|10", a number, a set or a range."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

_PART = re.compile(r"(\d+)(?:-(\d+))?")
_MEANT = 'it can be a string such as "0|3-5|10", a number, a set or a range of numbers'


@dataclass(frozen=True)
class Numbers:
    """Some whole numbers from 0 on."""

    parts: tuple[range, ...]

    def __contains__(self, number: int) -> bool:
        return any(number in part for part in self.parts)

    @property
    def first(self) -> int:
        """The smallest of them; 0 if there is none."""
        return min((part[0] for part in self.parts if part), default=0)

    def __str__(self) -> str:
        return "|".join(map(_text, self.parts))


def numbers(value: Any, option: str) -> Numbers:
    """The numbers that `value` stands for.

    Args:
        value: a string in the syntax of TorchAir's `dump_step`, a number, a range, or a set, list
            or tuple of numbers.
        option: what it was given for, for the errors.

    Raises:
        TypeError: `value` is none of these.
        ValueError: a string in another syntax, or a negative number.
    """
    if isinstance(value, Numbers):
        return value
    if isinstance(value, str):
        return Numbers(tuple(_range_of(part, value, option) for part in value.split("|") if part))
    if isinstance(value, range):
        _refuse_negative(option, *value[:1], *value[-1:])
        return Numbers((value,))
    members = list(value) if isinstance(value, (Set, list, tuple)) else [value]
    if not all(isinstance(member, int) and not isinstance(member, bool) for member in members):
        raise TypeError(f"{option} is {value!r}; {_MEANT}")
    _refuse_negative(option, *members)
    return Numbers(tuple(range(number, number + 1) for number in sorted(set(members))))


def _range_of(part: str, whole: str, option: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{option} is {whole!r}; {_MEANT}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{option} is {whole!r}, and {part} ends before it begins; {_MEANT}")
    return range(first, last + 1)


def _refuse_negative(option: str, *members: int) -> None:
    for number in members:
        if number < 0:
            raise ValueError(f"{option} has {number}, and they are counted from 0")


def _text(part: range) -> str:
    if len(part) == 1:
        return str(part[0])
    return f"{part[0]}-{part[-1]}" if part.step == 1 and len(part) else str(part)
