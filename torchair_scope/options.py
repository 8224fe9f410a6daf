"""The options of a scope: what of it is dumped, when, and where to.

An option may be given in several places. The most local one wins: the scope itself, the scope
around it, the backend (its config, its arguments), `configure`, an environment variable
`TORCHAIR_SCOPE_*`, and else the built-in value.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from torchair_scope import switch
from torchair_scope.numbers import Numbers, numbers
from torchair_scope.samples import Sample, sample
from torchair_scope.sizes import size

Mode = Literal["all", "input", "output"]
OnError = Literal["warn", "raise"]
EngineName = Literal["interpret", "tap"]
Taps = Literal["all", "boundary"]
Ops = str | Callable[[torch.fx.Node], Any]
Data = Literal["tensors", "stats", "both"]
When = Literal["nonfinite", "nonfinite:first"] | Callable[[torch.Tensor], Any]

MODES = ("all", "input", "output")
ON_ERROR = ("warn", "raise")
ENGINES = ("interpret", "tap")
TAPS = ("all", "boundary")
DATA = ("tensors", "stats", "both")
WHEN = ("nonfinite", "nonfinite:first")


class GivenOptions(TypedDict, total=False):
    """The options as a user writes them; see `data_dump`."""

    mode: Mode | None
    steps: str | int | range | set[int] | frozenset[int] | list[int] | tuple[int, ...] | None
    ranks: str | int | range | set[int] | frozenset[int] | list[int] | tuple[int, ...] | None
    ops: Ops | None
    path: str | os.PathLike[str] | None
    on_error: OnError | None
    lag: int | None
    max_inflight: int | str | None
    data: Data | None
    sample: Sample | int | str | Mapping[str, int] | slice | tuple[slice, ...] | None
    max_bytes: int | str | None
    max_calls: int | None
    min_free: int | str | None
    when: When | None
    keep_last: int | None
    max_held: int | str | None
    engine: EngineName | None
    tap: Taps | None


class Limit(NamedTuple):
    """How much may be saved of a scope, or by the whole process.

    Args:
        scope: the path of the scope, those in it included; None for the process.
        max_bytes: of the files that are written.
        max_calls: of which tensors are saved.
    """

    scope: str | None
    max_bytes: int | None
    max_calls: int | None


@dataclass(frozen=True)
class Options:
    """Options as they were given in one place; None for one that was not."""

    mode: Mode | None = None
    steps: Numbers | None = None
    ranks: Numbers | None = None
    ops: Ops | None = None
    path: str | None = None
    on_error: OnError | None = None
    lag: int | None = None
    max_inflight: int | None = None
    data: Data | None = None
    sample: Sample | None = None
    max_bytes: int | None = None
    max_calls: int | None = None
    min_free: int | None = None
    when: When | None = None
    keep_last: int | None = None
    max_held: int | None = None
    engine: EngineName | None = None
    tap: Taps | None = None
    # Not an option: the limits of all scopes around, where the options above have the nearest.
    limits: tuple[Limit, ...] = ()

    def over(self, other: Options) -> Options:
        """These options, and for those that were not given the ones of `other`."""
        given = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        if self.limits:
            given["limits"] = tuple(dict.fromkeys((*other.limits, *self.limits)))
        return replace(other, **given) if given else other

    def of_scope(self, path: str) -> Options:
        """These options, given to the scope with this path: its limits are those of no other."""
        limit = Limit(path, self.max_bytes, self.max_calls)
        return replace(self, limits=(limit,)) if limit[1:] != (None, None) else self

    def selects(self, step: int) -> bool:
        """Whether a step is dumped."""
        return self.steps is None or step in self.steps

    def selects_rank(self, rank: int) -> bool:
        """Whether a process with this rank dumps."""
        return self.ranks is None or rank in self.ranks

    def selects_operator(self, node: torch.fx.Node) -> bool:
        """Whether an operator is dumped."""
        if self.ops is None:
            return True
        if isinstance(self.ops, str):
            return fnmatch.fnmatchcase(str(node.target), self.ops)
        return bool(self.ops(node))


NAMES = tuple(field.name for field in fields(Options) if field.name != "limits")
NONE = Options()


def options_of(given: Mapping[str, Any], giver: str) -> Options:
    """Check options as a user has written them.

    Args:
        given: by name.
        giver: how errors call what they were given to.

    Raises:
        TypeError: there is no such option, or its value is of a wrong type.
        ValueError: it cannot have this value.
    """
    for name in given:
        if name not in NAMES:
            raise TypeError(f"{giver} has no option {name!r}: {_hint(name, NAMES)}")
    checks = {name: _CHECKS[name](value) for name, value in given.items() if value is not None}
    return Options(**checks)


def _hint(name: str, legal: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, legal, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"all options {', '.join(legal)}"


def _one_of(legal: tuple[str, ...], name: str, value: Any) -> str:
    if isinstance(value, str) and value in legal:
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name} is {value!r}; it can be one of {', '.join(legal)}")


def _ops(value: Any) -> Any:
    if isinstance(value, str) or callable(value):
        return value
    raise TypeError(
        f"ops is {value!r}; it can be a pattern such as 'aten.mm*', which targets are compared "
        "with, or a predicate that is called with a torch.fx.Node"
    )


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"path is {value!r}; it can be a str or an os.PathLike")
    return os.path.realpath(os.fsdecode(value))


def _lag(value: Any) -> int:
    number = _whole_number("lag", value)
    if number not in (0, 1):
        raise ValueError(
            f"lag is {value!r}; it can be 0, for files that are there when a graph's run returns, "
            "or 1, for files that are there when the next one returns"
        )
    return number


def _some_bytes(name: str, value: Any) -> int:
    number = size(value, name)
    if number < 1:
        raise ValueError(f"{name} is {value!r}; it can be a number of bytes, from 1")
    return number


def _count(name: str, value: Any) -> int:
    number = _whole_number(name, value)
    if number < 0:
        raise ValueError(f"{name} is {value!r}; it can be a number from 0")
    return number


def _when(value: Any) -> Any:
    if callable(value) or value in WHEN:
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(
        f"when is {value!r}; it can be one of {', '.join(WHEN)}, or a predicate that is called "
        "with each tensor"
    )


def _whole_number(name: str, value: Any) -> int:
    text = isinstance(value, str)
    if text and value.strip().isdecimal():
        return int(value)
    if text or isinstance(value, bool) or not isinstance(value, int):
        kind = ValueError if text else TypeError
        raise kind(f"{name} is {value!r}; it can be a whole number")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "mode": functools.partial(_one_of, MODES, "mode"),
    "steps": functools.partial(numbers, option="steps"),
    "ranks": functools.partial(numbers, option="ranks"),
    "ops": _ops,
    "path": _path,
    "on_error": functools.partial(_one_of, ON_ERROR, "on_error"),
    "lag": _lag,
    "max_inflight": functools.partial(_some_bytes, "max_inflight"),
    "data": functools.partial(_one_of, DATA, "data"),
    "sample": sample,
    "max_bytes": functools.partial(size, option="max_bytes"),
    "max_calls": functools.partial(_count, "max_calls"),
    "min_free": functools.partial(size, option="min_free"),
    "when": _when,
    "keep_last": functools.partial(_count, "keep_last"),
    "max_held": functools.partial(_some_bytes, "max_held"),
    "engine": functools.partial(_one_of, ENGINES, "engine"),
    "tap": functools.partial(_one_of, TAPS, "tap"),
}


# What holds for the whole process

_defaults = NONE
_BUILT_IN = Options(
    mode="all",
    on_error="warn",
    lag=0,
    max_inflight=1 << 30,
    data="tensors",
    min_free=1 << 30,
    keep_last=0,
    max_held=4 << 30,
    engine="interpret",
    tap="all",
)


class Configured(AbstractContextManager[None]):
    """What `configure` gives: its options hold from now on, or only inside a `with` block."""

    def __init__(self, before: Options) -> None:
        self._before = before

    def __exit__(self, *exc_info: object) -> None:
        global _defaults
        _defaults = self._before


def set_defaults(given: Mapping[str, Any]) -> Configured:
    """Set defaults of this process; an option that is None has none from then on."""
    global _defaults
    checked = options_of(given, "configure")
    configured = Configured(_defaults)
    _defaults = replace(_defaults, **{name: getattr(checked, name) for name in given})
    return configured


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{switch.VARIABLE}_{name.upper()}"


_VARIABLES = tuple(map(variable, NAMES))
# They name the plan of a bisection, and switch kernels off.
_NO_OPTIONS = (variable("bisect"), variable("native"))


def from_environment() -> Options:
    """The options that stand in environment variables now.

    Raises:
        ValueError: an option cannot have the value of its variable.
    """
    return _from_variables(tuple(map(os.environ.get, _VARIABLES)))


@functools.lru_cache(maxsize=8)
def _from_variables(values: tuple[str | None, ...]) -> Options:
    given = {name: value for name, value in zip(NAMES, values, strict=True) if value}
    path = given.pop("path", None)  # As it is: relative to the folder that is current at each use.
    return replace(options_of(given, "the environment"), path=path)


def _refuse_misspelt_variables() -> None:
    for name in os.environ:
        if name.startswith(f"{switch.VARIABLE}_") and name not in (*_VARIABLES, *_NO_OPTIONS):
            raise TypeError(f"there is no environment variable {name}: {_hint(name, _VARIABLES)}")


def in_force(options: Options) -> Options:
    """The options with the defaults of this process for those that were not given."""
    of_process = _defaults.over(from_environment())
    limit = Limit(None, of_process.max_bytes, of_process.max_calls)
    merged = options.over(of_process).over(_BUILT_IN)
    return replace(merged, limits=(limit, *options.limits))


# A wrong variable fails when the package is imported.
_refuse_misspelt_variables()
from_environment()


# Options on graphs: a graph can be copied and written to disk, so it holds a key in their place.

_by_key: dict[str, Options] = {"": NONE}
_keys: dict[tuple[Any, ...], str] = {}
_lock = threading.Lock()


def key_of(options: Options) -> str:
    """The key under which these options can be found in this process."""
    if options == NONE:
        return ""
    values = (*(getattr(options, name) for name in NAMES), options.limits)
    identity = tuple(id(value) if callable(value) else value for value in values)
    with _lock:
        key = _keys.setdefault(identity, str(len(_by_key)))
        _by_key.setdefault(key, options)  # It keeps a predicate alive, and so its id its own.
        return key


def options_with_key(key: str) -> Options:
    """The options of a key; none for a key of another process."""
    return _by_key.get(key, NONE)
