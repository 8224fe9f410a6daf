"""Which tensors hold what an earlier one held: known without reading them.

A tensor is the same value as an earlier one if it is the same part of the same memory, and nothing
has written to it since. Torch counts writes in the version of a tensor, but not all of them:

* not while the operator still runs, for a mode on the thread, and not below autograd. So who runs
  operators says beforehand what they write to, by `writing`.
* not those through `.data`, NumPy or another process. They cannot happen while a compiled graph
  runs. So memory on the host that was seen in an earlier step is read once in each, at the speed of
  memory, and its checksum compared with the one that it had then. In eager code they can, so there
  each value is judged by its own checksum.
* none for inference tensors, which so are known within one step only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchair_scope import _torch_private
from torchair_scope.store import native
from torchair_scope.store.arrays import Array
from torchair_scope.store.device import wait_for_copies
from torchair_scope.store.pool import pool
from torchair_scope.store.sections import section

_MOST_STORAGES = 1 << 14
_MOST_VIEWS = 64  # of one storage

Place = tuple[Any, ...]


class Reading:
    """The checksum of memory in one step, made once somebody asks for it; by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: int | None = None

    def is_as(self, before: Reading, tensor: torch.Tensor) -> bool:
        """Whether the memory that a tensor lies in is now as it was in an earlier step.

        If it was not read there, that is not known: False.
        """
        with self._lock:
            if self._total is None:
                self._total = checksum(_torch_private.bytes_of_storage(tensor))
        return self._total == before._total


@dataclass
class Sighting:
    """A value that has been handed over.

    Attributes:
        version: of its tensor; None for an inference tensor.
        step: which step it was last seen in.
        value: what is known of it there.
        reading: of its memory in that step.
    """

    version: int | None
    step: object
    value: Any
    reading: Reading


class _Storage:
    """Memory that tensors lie in.

    Attributes:
        reference: keeps the storage's address from being used again, but not its memory. So a
            tensor that lives and has this address lies in this storage.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = _torch_private.weak_storage(tensor)
        self.sightings: dict[Place, Sighting] = {}
        self._step: object = None
        self._reading = Reading()

    def reading(self, step: object) -> Reading:
        """The one of a step, the newest."""
        if self._step is not step:
            self._step, self._reading = step, Reading()
        return self._reading


class Known:
    """The values that a dump has been handed, by the memory that they lie in."""

    def __init__(self) -> None:
        self._storages: OrderedDict[int, _Storage] = OrderedDict()
        self._lock = threading.Lock()
        _all.add(self)

    def find(self, tensor: torch.Tensor, step: object) -> Sighting | None:
        """What this tensor was known as; None if it has been written to since."""
        address = _torch_private.storage_address(tensor)
        with self._lock:
            storage = self._storages.get(address)
            if storage is None:
                return None
            sighting = storage.sightings.get(_place(tensor))
            if sighting is None:
                return None
            version = _version(tensor)
            valid = version == sighting.version and (version is not None or sighting.step is step)
            if not valid:
                del self._storages[address]
                return None
            self._storages.move_to_end(address)
            return sighting

    def reading(self, tensor: torch.Tensor, step: object) -> Reading:
        """The reading in this step of the memory that a tensor lies in, which `find` has found."""
        with self._lock:
            storage = self._storages.get(_torch_private.storage_address(tensor))
            return Reading() if storage is None else storage.reading(step)

    def add(self, tensor: torch.Tensor, step: object, value: Any) -> None:
        """Remember what a tensor is known as from now on."""
        address = _torch_private.storage_address(tensor)
        with self._lock:
            storage = self._storages.get(address)
            if storage is None:
                storage = self._storages[address] = _Storage(tensor)
            if len(storage.sightings) >= _MOST_VIEWS:
                storage.sightings.clear()
            seen = Sighting(_version(tensor), step, value, storage.reading(step))
            storage.sightings[_place(tensor)] = seen
            if len(self._storages) > _MOST_STORAGES:
                self._storages.popitem(last=False)

    def forget(self, addresses: Iterable[int]) -> None:
        """Forget what lies in some storages."""
        with self._lock:
            for address in addresses:
                self._storages.pop(address, None)

    def forget_freed(self) -> None:
        """Forget what lies in memory that has been freed."""
        with self._lock:
            freed = [a for a, storage in self._storages.items() if storage.reference.expired()]
            for address in freed:
                del self._storages[address]


class Seen:
    """The tensors of one step whose writes are announced, known by the objects that they are.

    Most inputs of an operator are outputs of another one, or weights that have been handed over.
    All are forgotten at each announced write, to whatever memory: in a functional graph there are
    few.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[weakref.ref[torch.Tensor], int | None, Any]] = {}
        self._since = _last_write

    def find(self, tensor: torch.Tensor) -> Any:
        """What a tensor is known as; None if it is not, or may have been written to since."""
        self._forget_what_was_written_to()
        reference, version, known = self._by_object.get(id(tensor), _UNSEEN)
        return known if reference() is tensor and version == _version(tensor) else None

    def add(self, tensor: torch.Tensor, known: Any) -> None:
        """Remember what a tensor is known as from now on."""
        self._forget_what_was_written_to()
        self._by_object[id(tensor)] = weakref.ref(tensor), _version(tensor), known

    def clear(self) -> None:
        """Forget all of them."""
        self._by_object.clear()

    def _forget_what_was_written_to(self) -> None:
        if self._since is not _last_write:
            self._since = _last_write
            self.clear()


_last_write = object()  # another one after each announced write
_UNSEEN: Any = lambda: None, None, None
_all: weakref.WeakSet[Known] = weakref.WeakSet()


def _place(tensor: torch.Tensor) -> Place:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # An inference tensor has none. To ask before would cost more.
        return None


@contextlib.contextmanager
def writing(tensors: Iterable[Any]) -> Iterator[None]:
    """A block that writes to the memory of some tensors.

    What waits to be written to disk of it is written first, and nothing of it is known afterwards.
    """
    global _last_write
    written = list(filter(_has_storage, tensors))
    addresses = [_torch_private.storage_address(tensor) for tensor in written]
    with section:
        pool().wait_for_readers(addresses)
        for device in {tensor.device for tensor in written}:
            wait_for_copies(device)
    try:
        yield
    finally:
        _last_write = object()
        with section:
            for known in list(_all):
                known.forget(addresses)


def _has_storage(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return False
    return True


_ROW = 4096  # words of 8 bytes
_WEIGHTS = torch.from_numpy(
    np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, _ROW, dtype=np.int64) | 1
)


def checksum(data: Array) -> int:
    """A number that most surely differs if the bytes do; fast, not secure.

    Each row of a matrix of words is multiplied by odd weights, as integers that wrap around. There
    the highest bit of a word has a weight in the highest bit of the sum only, and an even number of
    changed signs would cancel out. So it is done once more for words that begin 4 bytes later.
    """
    total = native.checksum(data)
    return hash((_weighed(data), _weighed(data[4:]))) if total is None else total


def _weighed(data: Array) -> bytes:
    rows = len(data) // (8 * _ROW)
    whole = data[: rows * 8 * _ROW]
    rest = data[rows * 8 * _ROW :].tobytes()
    if not rows:
        return rest
    # Torch warns of an array that cannot be written to.
    words = torch.from_numpy(whole if whole.flags.writeable else whole.copy()).view(torch.int64)
    return bytes(torch.mv(words.view(rows, _ROW), _WEIGHTS).numpy().tobytes()) + rest


def _forget() -> None:
    for known in list(_all):
        known._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
