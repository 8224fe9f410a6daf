"""Numbers of bytes, as a user writes them: 1000, "500MB", "2GiB"."""

from __future__ import annotations

import re
from typing import Any

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_BY_LOWER_CASE: dict[str, int] = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def size(value: Any, option: str) -> int:
    """The number of bytes that `value` stands for.

        >>> from torchair_scope.sizes import size
        >>> size("1.5 KiB", "max_bytes")
        1536

    Args:
        value: a whole number, or a string of a number and a unit: B, KB, MB, GB, TB are powers of
            1000, KiB, MiB, GiB, TiB of 1024.
        option: what it was given for, for the errors.

    Raises:
        TypeError: `value` is neither.
        ValueError: a negative number, or a string in another syntax.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{option} is {value}; a number of bytes is not negative")
        return value
    meant = "it can be a number of bytes, or a string such as '500MB' or '2GiB'"
    if not isinstance(value, str):
        raise TypeError(f"{option} is {value!r}; {meant}")
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _BY_LOWER_CASE:
        raise ValueError(f"{option} is {value!r}; {meant}")
    number, factor = match[1], _BY_LOWER_CASE[match[2].lower()]
    return round(float(number) * factor) if "." in number else int(number) * factor


def as_text(number: int) -> str:
    """A number of bytes for people, `1.5 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if number >= _UNITS[unit]:
            return f"{number / _UNITS[unit]:.4g} {unit}"
    return f"{number} B"
