"""Long arrays, read a block at a time; what has been read of a mapped file leaves the memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from torchair_scope.analysis.source import Array

# Elements. What is computed from a block stays in the processor's cache.
BLOCK = 1 << 16
# Blocks after which their pages are given back.
_KEPT = 64


def flat_reals(array: Array) -> Array:
    """The elements in a row; of complex numbers the parts, one after the other."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "c":
        return flat.view(np.float32 if flat.dtype.itemsize == 8 else np.float64)
    return flat


def blocks(*flat: Array) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Pieces of long rows of one length: where each begins, and a part of each row.

    A row of a mapped file is not in memory as a whole: pages that were read are given back, so
    that a tensor larger than the memory, or than a limit on it, can be read.
    """
    size, kept = flat[0].size, 0
    for start in range(0, size, BLOCK):
        yield start, tuple(row[start : start + BLOCK] for row in flat)
        if start - kept >= _KEPT * BLOCK:
            for row in flat:
                _give_back(row[kept:start])
            kept = start


def _give_back(row: Array) -> None:
    """Take the pages of a mapped file out of this process; they are read again if need be."""
    owner: object = row
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = row.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = begin + row.nbytes - first
    if length > 0:
        owner.madvise(mmap.MADV_DONTNEED, first, length)
