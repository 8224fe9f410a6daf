"""One array as a `.npy` file that is whole or not there."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os

import numpy as np

from torchair_scope.store import layout
from torchair_scope.store.arrays import Array

_temporary_number = itertools.count()


def write_npy(folder: str, name: str, array: Array) -> int:
    """Write an array as `folder/name` whole or not at all; give the bytes of the file.

    A missing folder is made.

    **Raises:** `OSError`; nothing is left behind.
    """
    temporary = os.path.join(folder, f".{os.getpid()}-{next(_temporary_number)}.part")
    descriptor = _create(temporary)
    try:
        try:
            size = _write_array(descriptor, array)
        finally:
            os.close(descriptor)
        os.rename(temporary, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, layout.FILE_MODE)
    except FileNotFoundError:
        layout.make_folders(os.path.dirname(path))
        return os.open(path, flags, layout.FILE_MODE)


def _write_array(descriptor: int, array: Array) -> int:
    header = _header(array.dtype.str, array.shape)
    data = np.ravel(array, order="C").view(np.uint8).data
    written = os.writev(descriptor, [header, data])
    while written < len(header) + len(data):
        if written < len(header):
            written += os.write(descriptor, header[written:])
        else:
            written += os.write(descriptor, data[written - len(header) :])
    return written


@functools.lru_cache(maxsize=4096)
def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()
