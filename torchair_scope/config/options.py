"""The kinds of option a configuration is built from: choices, paths, callables and groups of these.

An option is checked when it is set, so that a wrong configuration fails on the line that wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

Stored = TypeVar("Stored")
Given = TypeVar("Given")
Group = TypeVar("Group", bound="OptionGroup")


class OptionValue:
    """What a choice reads as: `config.debug.data_dump.type.value` is the value chosen, or None.

    TorchAir wraps such values in the same way, so code that reads `.value` runs with both. The
    object is falsy while nothing is chosen.

    Raises:
        ValueError: on setting `.value` to anything but None or a legal value.
    """

    def __init__(self, name: str, legal: tuple[str, ...], unavailable: Mapping[str, str]) -> None:
        self._name = name
        self._legal = legal
        self._unavailable = unavailable
        self._value: str | None = None

    @property
    def value(self) -> str | None:
        """The value chosen, or None."""
        return self._value

    @value.setter
    def value(self, value: str | None) -> None:
        if value is not None and not (isinstance(value, str) and value in self._legal):
            refusal = (
                f"Value {value!r} (type: {type(value)}) not in optional list "
                f"{[None, *self._legal]} of {self._name}. "
            )
            raise ValueError((refusal + self._unavailable.get(str(value), "")).rstrip())
        self._value = value

    def __bool__(self) -> bool:
        return self._value is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptionValue):
            return NotImplemented
        return (self._name, self._value) == (other._name, other._value)

    __hash__ = None  # type: ignore[assignment]  # a configuration can change, so it has no hash

    def __repr__(self) -> str:
        return repr(self._value)


class Option(Generic[Stored, Given]):
    """One option of an `OptionGroup`, declared in the group's class body.

    A subclass says what an unset option reads as (`_initial`) and what becomes of a value that is
    set (`_assign`).
    """

    name: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, group: None, owner: type) -> Option[Stored, Given]: ...
    @overload
    def __get__(self, group: OptionGroup, owner: type) -> Stored: ...
    def __get__(self, group: OptionGroup | None, owner: type) -> Option[Stored, Given] | Stored:
        return self if group is None else vars(group)[self.name]

    def __set__(self, group: OptionGroup, value: Given) -> None:
        vars(group)[self.name] = self._assign(vars(group)[self.name], value)

    def _initial(self, owner: str) -> Stored:
        """Value of the option in a new group of the class named `owner`."""
        raise NotImplementedError

    def _assign(self, current: Stored, value: Given) -> Stored:
        """Value to keep when the option, now `current`, is set to `value`."""
        raise NotImplementedError


class Choice(Option[OptionValue, "str | None"]):
    """None or one of some strings; reads as an `OptionValue`.

    `unavailable` maps values that TorchAir knows and this package cannot serve to what to do
    instead.
    """

    def __init__(self, *legal: str, unavailable: Mapping[str, str] | None = None) -> None:
        self._legal = legal
        self._unavailable = unavailable or {}

    def _initial(self, owner: str) -> OptionValue:
        return OptionValue(f"{owner}.{self.name}", self._legal, self._unavailable)

    def _assign(self, current: OptionValue, value: str | None) -> OptionValue:
        current.value = value
        return current


class CheckedValue:
    """What a checked option reads as: `.value` is its value as text, as TorchAir has it.

    Attributes:
        given: the value that was set, as it was; None if none was.
    """

    def __init__(self, default: Any, check: Callable[[Any], Any]) -> None:
        self._default = default
        self._check = check
        self.given: Any = None

    @property
    def value(self) -> str:
        """The value as text; "1" and "0" for True and False."""
        value = self._default if self.given is None else self.given
        return str(int(value)) if isinstance(value, bool) else str(value)

    @value.setter
    def value(self, value: Any) -> None:
        self.given = self._check(value)

    def __bool__(self) -> bool:
        return bool(self._default if self.given is None else self.given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedValue) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]  # a configuration can change, so it has no hash

    def __repr__(self) -> str:
        return repr(self._default if self.given is None else self.given)


class Checked(Option[CheckedValue, Any]):
    """A value that a function checks when it is set; reads as a `CheckedValue`.

    Args:
        default: what an unset option reads as.
        check: gives the value to keep, or raises.
    """

    def __init__(self, default: Any, check: Callable[[Any], Any]) -> None:
        self._default = default
        self._check = check

    def _initial(self, owner: str) -> CheckedValue:
        return CheckedValue(self._default, self._check)

    def _assign(self, current: CheckedValue, value: Any) -> CheckedValue:
        current.value = value
        return current


class FolderPath(Option["str | None", "str | os.PathLike[str] | None"]):
    """A folder, made absolute when it is set; None is the folder that is current at each use."""

    def _initial(self, owner: str) -> None:
        return None

    def _assign(self, current: str | None, value: str | os.PathLike[str] | None) -> str | None:
        if value is None:
            return None
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"{self.name} must be str, os.PathLike or None, got {type(value)}")
        try:
            return os.path.realpath(value)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.name} is {os.fspath(value)!r}, relative to a current folder that is gone; "
                "set an absolute path"
            ) from None


class CallableOption(Option["Callable[..., Any] | None", "Callable[..., Any] | None"]):
    """A callable, or None."""

    def _initial(self, owner: str) -> None:
        return None

    def _assign(
        self, current: Callable[..., Any] | None, value: Callable[..., Any] | None
    ) -> Callable[..., Any] | None:
        if value is not None and not callable(value):
            raise TypeError(f"{self.name} must be Callable or None, got {type(value)}")
        return value


class SubGroup(Option[Group, Group]):
    """A group of options inside another group."""

    def __init__(self, kind: type[Group]) -> None:
        self._kind = kind

    def _initial(self, owner: str) -> Group:
        return self._kind()

    def _assign(self, current: Group, value: Group) -> Group:
        if type(value) is not self._kind:
            raise TypeError(
                f"{self.name} is a group of options {self._kind.option_names()}, set one of "
                f"those instead of the group (got {value!r})"
            )
        return value


class OptionGroup:
    """Base of everything that holds options: refuses what it does not know, copies and compares.

    Raises:
        ValueError: on setting an option that does not exist; the message lists those that do.
        AttributeError: on reading one, with the same message.
    """

    def __init__(self) -> None:
        for option in self._options():
            vars(self)[option.name] = option._initial(type(self).__name__)

    @classmethod
    def _options(cls) -> list[Option[Any, Any]]:
        members = {
            name: member for owner in reversed(cls.__mro__) for name, member in vars(owner).items()
        }
        return [member for member in members.values() if isinstance(member, Option)]

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options of this group."""
        return [option.name for option in cls._options()]

    @classmethod
    def _no_option(cls, name: str) -> str:
        return f"{cls.__name__} has no option {name}, all options {cls.option_names()}"

    # Hidden from type checkers, which then report an unknown option themselves.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if name not in self.option_names():
                raise ValueError(self._no_option(name))
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> object:
            raise AttributeError(self._no_option(name))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # a configuration can change, so it has no hash

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"
