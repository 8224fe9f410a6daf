"""`manifest.jsonl`: argument trees as JSON and back, and the file that takes the records.

A record is one JSON object on one line; `record` says whether it is a `run`, a `graph`, a `step`,
a `call` or, when the process ends, the `account` of a scope. In an argument tree, JSON's null,
true, numbers, strings and arrays are Python's None, bool, int, float, str and list; everything
else is an object with one key that names its kind, such as `{"tuple": […]}`,
`{"dtype": "torch.float32"}` or `{"tensor": {"slot": "INPUT.0", …}}`.
"""

from __future__ import annotations

import collections
import errno
import json
import keyword
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from torchair_scope.store.arrays import SYMBOLIC
from torchair_scope.store.layout import FILE_MODE
from torchair_scope.store.sections import section

Record = dict[str, Any]
HandOver = Callable[[torch.Tensor, str], Record]
Load = Callable[[Record], torch.Tensor]

_OpOverload: type = type(torch.ops.aten.add.Tensor)
_OpOverloadPacket: type = type(torch.ops.aten.add)


class Opaque:
    """Stands for an argument of which only the text was kept: it cannot be used in a re-run."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Opaque({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


# Python to JSON


def encode(value: Any, slot: str, hand_over: HandOver) -> Any:
    """Give an argument tree as JSON.

        >>> from torchair_scope.store.manifest import encode
        >>> encode((1, float("nan")), "INPUT.0", lambda tensor, slot: {"slot": slot})
        {'tuple': [1, {'float': 'nan'}]}

    `hand_over(tensor, slot)` gives the description of each tensor; a member of a list, tuple or
    dict has the slot of the whole with its position appended. What has no encoding becomes
    `{"repr": …}`.
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": hand_over(value, slot)}
    if isinstance(value, list | tuple | dict):
        return _encode_container(value, slot, hand_over)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [encode(part, slot, hand_over) for part in parts]}
    return encode_constant(value)


def encode_constant(value: Any) -> Any:
    """Give a value that holds no tensor as JSON."""
    if value is None or type(value) in (bool, int, str):
        return value
    for symbolic, number in SYMBOLIC.items():
        if isinstance(value, symbolic):
            try:
                value = number(value)
            except Exception:  # an unbacked symbol has no value
                return {"repr": _repr(value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, torch.fx.GraphModule):
        return {"graph_module": _printed(value)}
    return {"repr": _repr(value)}


def _encode_container(value: Any, slot: str, hand_over: HandOver) -> Any:
    members = value.values() if isinstance(value, dict) else value
    encoded = [encode(m, f"{slot}.{j}", hand_over) for j, m in enumerate(members)]
    kind = type(value)
    if kind is list:
        return encoded
    if isinstance(value, dict):
        keys = [encode_constant(key) for key in value]
        return {"dict": [list(pair) for pair in zip(keys, encoded, strict=True)]}
    if kind is torch.Size:
        return {"size": encoded}
    fields = getattr(kind, "_fields", None) or _struct_fields(kind)
    if fields:
        return {"namedtuple": [f"{kind.__module__}.{kind.__name__}", list(fields), encoded]}
    return {"tuple": encoded} if isinstance(value, tuple) else encoded


def _struct_fields(kind: type) -> tuple[str, ...] | None:
    """Field names of `torch.return_types.max` and the like."""
    return getattr(kind, "__match_args__", None) if hasattr(kind, "n_fields") else None


_ENCODERS: dict[type, Callable[[Any], Record]] = {
    complex: lambda value: {"complex": [encode_constant(value.real), encode_constant(value.imag)]},
    torch.dtype: lambda value: {"dtype": str(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.layout: lambda value: {"layout": str(value)},
    torch.memory_format: lambda value: {"memory_format": str(value)},
    type(Ellipsis): lambda value: {"ellipsis": True},
    _OpOverload: lambda value: {"op": str(value)},
    _OpOverloadPacket: lambda value: {"op": str(value)},
}

_printed_modules: weakref.WeakKeyDictionary[torch.fx.GraphModule, str] = weakref.WeakKeyDictionary()


def _printed(module: torch.fx.GraphModule) -> str:
    if module not in _printed_modules:
        _printed_modules[module] = module.print_readable(print_output=False)
    return _printed_modules[module]


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__} object, whose repr raises {type(error).__name__}>"


def plain(value: Any) -> Any:
    """Give facts for a record as JSON for people: what is not JSON becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(member) for member in value]
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    constant = encode_constant(value)
    return constant if type(constant) in (bool, int, float) else str(value)


# JSON to Python


def decode(encoded: Any, load: Load, device: str | torch.device | None = None) -> Any:
    """Give back the argument tree that `encode` was called on.

    `load(description)` gives each tensor. With `device`, recorded devices give way to it. What only
    a text was kept of comes back as `Opaque`.
    """
    if isinstance(encoded, list):
        return [decode(member, load, device) for member in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return load(content)
    if kind == "device":
        keep = device is None or content == "meta"
        return torch.device(content if keep or device is None else device)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(member, load, device) for member in content])
    if kind == "dict":
        return {_hashable(decode(k, load)): decode(v, load, device) for k, v in content}
    if kind == "namedtuple":
        name, fields, members = content
        return _named_tuple(name, fields, [decode(member, load, device) for member in members])
    decoder = _DECODERS.get(kind)
    return Opaque(str(content)) if decoder is None else decoder(content)


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _named_tuple(name: str, fields: list[str], members: list[Any]) -> Any:
    """Build torch's own type if it is one, else a named tuple of the same fields."""
    module, _, short = name.rpartition(".")
    if module == "torch.return_types" and hasattr(torch.return_types, short):
        return getattr(torch.return_types, short)(members)
    usable = short.isidentifier() and not keyword.iskeyword(short)
    kind = collections.namedtuple(short if usable else "Named", fields, rename=True)  # type: ignore[misc]
    return kind(*members)


def _torch_attribute(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def resolve_op(name: str) -> Any:
    """Find an operator by its name, as `aten.add.Tensor` or `aten.add`.

    **Raises:** `AttributeError` if no such operator is registered in this process.
    """
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "dtype": _torch_attribute,
    "layout": _torch_attribute,
    "memory_format": _torch_attribute,
    "op": resolve_op,
    "ellipsis": lambda content: ...,
}


# The file

_as_json = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str).encode


class Manifest:
    """The manifest of one run, opened for appending; any thread may append.

    Records are written by one system call, so a killed process leaves at most one cut line, the
    last. A record that could not be written is kept, and goes before the next one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._unwritten = b""

    def append(self, *records: Record) -> None:
        """Write records, all by one system call.

        **Raises:** `OSError` if they could not be written yet.
        """
        lines = "".join([f"{_as_json(record)}\n" for record in records]).encode()
        with section, self._lock:
            self._unwritten += lines
            self._flush()

    def is_in_place(self) -> bool:
        """Say whether the file is open and still the one that its path leads to."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; an `append` would make it anew."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _flush(self) -> None:
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, FILE_MODE)
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, self._unwritten)
            if written < len(self._unwritten):
                # A disk that fills up takes a part; the rest of the call tells the reason.
                written += os.write(self._descriptor, self._unwritten[written:])
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        if written < len(self._unwritten):
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._unwritten = b""
