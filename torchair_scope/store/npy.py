"""Files that are whole or not there: one value each as `.npy`, and others."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from torchair_scope.store import layout, native, process
from torchair_scope.store.arrays import Array
from torchair_scope.store.native import SmallFile

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS)
_BLOCK = 1 << 18

_temporary_number = itertools.count()


class Npy:
    """A value as its file has it: header, and bytes in C order."""

    def __init__(self, array: Array) -> None:
        self.descr = array.dtype.str
        self.shape = array.shape
        self.data = np.ravel(array, order="C").view(np.uint8)

    @property
    def header(self) -> bytes:
        """What stands before the bytes."""
        return _header(self.descr, self.shape)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + len(self.data)


@functools.lru_cache(maxsize=4096)
def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


class Folder:
    """A folder that files are made in. It is made, and opened, with the first one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def descriptor(self) -> int:
        """The open folder."""
        if self._descriptor is not None:
            return self._descriptor
        with self._lock:
            if self._descriptor is None:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                try:
                    self._descriptor = os.open(self.path, flags)
                except FileNotFoundError:
                    layout.make_folders(self.path)
                    self._descriptor = os.open(self.path, flags)
            return self._descriptor

    def close(self) -> None:
        """Close the folder; the next file opens it again."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def make_small(folder: Folder, files: Sequence[SmallFile]) -> list[int] | None:
    """Make small files, one after the other; give the number of the error of each, 0 for none.

    None if that cannot be done in one go: make each alone.

    **Raises:** `OSError` if there can be no folder.
    """
    return native.make_files(folder.descriptor(), files, _temporary())


def write_npy(folder: Folder, name: str, value: Npy) -> int:
    """Write a value as a file whole or not at all; give the bytes of the file.

    **Raises:** `OSError`; nothing is left behind.
    """
    header, temporary = value.header, _temporary()
    error = native.make_file(folder.descriptor(), name, header, value.data, temporary)
    if error == 0:
        return value.size
    if error is not None and error != errno.ENOENT:
        raise OSError(error, os.strerror(error), name)
    # It cannot be done in one go, or someone has removed the folder.
    return _made(folder, name, lambda descriptor: _write(descriptor, value))


def write_bytes(folder: Folder, name: str, data: bytes) -> int:
    """Write a file that is no array, whole or not at all; give its bytes.

    **Raises:** `OSError`; nothing is left behind.
    """

    def fill(descriptor: int) -> int:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        return len(data)

    return _made(folder, name, fill)


def copy_npy(source: str, folder: Folder, name: str) -> int:
    """Write a file once more, from the one that there is; give its bytes."""
    with open(source, "rb", buffering=0) as file:

        def copy(descriptor: int) -> int:
            size = os.fstat(file.fileno()).st_size
            left = size
            while left:
                sent = os.sendfile(descriptor, file.fileno(), None, left)
                if not sent:
                    raise OSError(errno.EIO, "the file has been cut", source)
                left -= sent
            return size

        return _made(folder, name, copy)


def _made(folder: Folder, name: str, fill: Callable[[int], int]) -> int:
    temporary = _temporary()
    descriptor, at = _create(folder, temporary)
    try:
        try:
            size = fill(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise
    return size


def _temporary() -> str:
    """A name for a file that is not whole, which no other has."""
    return f".{process.number()}-{next(_temporary_number)}.part"


def _create(folder: Folder, name: str) -> tuple[int, int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    at = folder.descriptor()
    try:
        return os.open(name, flags, layout.FILE_MODE, dir_fd=at), at
    except FileNotFoundError:  # someone has removed it
        folder.close()
        at = folder.descriptor()
        return os.open(name, flags, layout.FILE_MODE, dir_fd=at), at


def _write(descriptor: int, value: Npy) -> int:
    header, data = value.header, value.data.data
    written = os.writev(descriptor, [header, data])
    while written < len(header) + len(data):
        if written < len(header):
            written += os.write(descriptor, header[written:])
        else:
            written += os.write(descriptor, data[written - len(header) :])
    return written


def link(source: str, folder: Folder, name: str) -> None:
    """Give a file a further name.

    **Raises:** `OSError`; see `has_no_links` and `errno.EMLINK`.
    """
    os.link(source, name, dst_dir_fd=folder.descriptor())


def has_no_links(error: OSError) -> bool:
    """Whether it was raised because the file system has no hard links."""
    return error.errno in _NO_LINKS


def holds(path: str, value: Npy) -> bool:
    """Whether a file has exactly these bytes."""
    header, data = value.header, value.data
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != len(header) + len(data):
            return False
        if os.pread(descriptor, len(header), 0) != header:
            return False
        same = native.file_has(descriptor, len(header), data)
        return _has(descriptor, len(header), data) if same is None else same
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _has(descriptor: int, offset: int, data: Array) -> bool:
    block = np.empty(min(_BLOCK, len(data)), dtype=np.uint8)
    for start in range(0, len(data), _BLOCK):
        expected = data[start : start + _BLOCK]
        count = os.preadv(descriptor, [block.data], offset + start)
        if count < len(expected) or not np.array_equal(block[: len(expected)], expected):
            return False
    return True
