"""What has to run at the speed of memory and of the system, by functions in C.

Where they cannot be compiled, or `TORCHAIR_SCOPE_NATIVE=0` is set, each function here gives None,
and its caller does the same in Python and by operators of torch, which takes several times as long.
"""

from __future__ import annotations

import array
import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchair_scope.store.arrays import Array
from torchair_scope.store.compiled import KINDS, kernels
from torchair_scope.store.layout import FILE_MODE
from torchair_scope.store.statistics import SUMS, Part

_NUMBERS = Part._fields[:-1]  # all but the hash


class _Part(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double if index < SUMS else ctypes.c_int64)
        for index, name in enumerate(_NUMBERS)
    ]


class SmallFile(NamedTuple):
    """A file to be made: with some content, or if that is empty, as a link to another one."""

    name: str
    content: bytes = b""
    source: str = ""


def part_of(values: torch.Tensor, tiny: float) -> Part | None:
    """What is in values that lie in a row; see `measuring_on_cpu`."""
    library = kernels()
    name = _NAMES.get(values.dtype)
    if library is None or name is None or values.data_ptr() % values.itemsize:
        return None
    part = _Part()
    kernel = getattr(library, f"part_{name}")
    kernel(values.data_ptr(), values.numel(), tiny, ctypes.byref(part))
    return Part(*(getattr(part, name) for name in _NUMBERS))


def bits_hash(data: torch.Tensor, weights: torch.Tensor, distance: int) -> int | None:
    """The hash that docs/statistics.md defines, of bytes that lie in a row."""
    library = kernels()
    if library is None:
        return None
    number = library.bits_hash(
        data.data_ptr(), data.numel(), weights.data_ptr(), weights.numel(), distance
    )
    return int(number)


def checksum(data: Array) -> int | None:
    """A number that most surely differs if the bytes do, for use in this process alone."""
    library = kernels()
    if library is None:
        return None
    return int(library.checksum(_address(data), data.size, _KEYS_AT))


def file_has(descriptor: int, offset: int, data: Array) -> bool | None:
    """Whether an open file has these bytes at a place in it; False if it cannot be read."""
    library = kernels()
    if library is None:
        return None
    return bool(library.file_has(descriptor, offset, _address(data), data.size) == 1)


def make_file(folder: int, name: str, header: bytes, data: Array, temporary: str) -> int | None:
    """Make a file in an open folder, whole or not at all; give the number of the error, or 0."""
    library = kernels()
    if library is None:
        return None
    names = os.fsencode(temporary), os.fsencode(name)
    content = header, len(header), _address(data), data.size
    return int(library.make_file(folder, FILE_MODE, *names, *content))


def make_files(folder: int, files: Sequence[SmallFile], temporary: str) -> list[int] | None:
    """Make files in an open folder, each whole or not at all; give the number of each one's error.

    **Arguments:**

    - `folder`: its descriptor.
    - `files`: what is to be made, one after the other: a later one may be a link to an earlier.
    - `temporary`: the name of a file until it is whole.
    """
    library = kernels()
    if library is None:
        return None
    text = "".join(f"{file.name}\0{file.source}\0" for file in files)
    content = b"".join([file.content for file in files])
    sizes = array.array("Q", [len(file.content) for file in files])
    errors = (ctypes.c_int * len(files))()
    named = os.fsencode(text), content, sizes.buffer_info()[0], os.fsencode(temporary)
    library.make_files(folder, FILE_MODE, len(files), *named, errors)
    return list(errors)


def _address(data: Array) -> int:
    address: int = data.__array_interface__["data"][0]  # `data.ctypes` makes objects for it.
    return address


_KEYS = np.random.default_rng(0).integers(0, 1 << 64, 32, dtype=np.uint64)
_KEYS_AT = _address(_KEYS)
_NAMES = {getattr(torch, kind): kind for kind in KINDS}
