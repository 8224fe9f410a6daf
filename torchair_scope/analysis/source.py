"""Where the files of a dump come from: a local folder, or any URL that fsspec can read."""

from __future__ import annotations

import io
import math
import mmap
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchair_scope.analysis.extras import need

Array = npt.NDArray[Any]
Identity = tuple[int, int]


def is_remote(url: str) -> bool:
    """Whether a path is a URL, which only fsspec can read."""
    return "://" in url


@dataclass(frozen=True)
class Entry:
    """One entry of a folder.

    Args:
        name: without the folder.
        is_folder: whether it has entries itself.
        size: bytes; 0 of a folder.
        identity: what names of one file have in common; None if that is not known.
    """

    name: str
    is_folder: bool
    size: int
    identity: Identity | None = None


@dataclass(frozen=True)
class File:
    """One file, by its path or URL."""

    url: str

    def read(self) -> bytes:
        """The whole file.

        **Raises:** `OSError` if it cannot be read.
        """
        if not is_remote(self.url):
            with open(self.url, "rb") as stream:
                return stream.read()
        fsspec = need("fsspec")
        try:
            with fsspec.open(self.url, "rb") as stream:
                return bytes(stream.read())
        except OSError:
            raise
        except Exception as error:  # each protocol has its own
            raise _unreadable(self.url, error) from error

    def check(self) -> None:
        """See that a local `.npy` file is whole, by its header and its size.

        **Raises:** `OSError` if it cannot be read, `ValueError` if it is cut or no array.
        """
        if not is_remote(self.url):
            _header(self.url)

    def array(self) -> Array:
        """The array in an `.npy` file; a local file is mapped into memory, not read.

        **Raises:** `OSError` if it cannot be read, `ValueError` if it is cut or no array.
        """
        if not is_remote(self.url):
            return _mapped(self.url)
        try:
            return np.asarray(np.load(io.BytesIO(self.read()), allow_pickle=False))
        except EOFError as error:
            raise ValueError(f"{self.url} is cut: {error}") from error


@dataclass(frozen=True)
class Folder:
    """One folder, by its path or URL."""

    url: str

    @property
    def name(self) -> str:
        """Its own name, without the folders above it."""
        path = self.url if is_remote(self.url) else os.path.abspath(self.url)
        return path.rstrip("/").rpartition("/")[2]

    @property
    def short(self) -> str:
        """Its path as people write it."""
        return self.url if is_remote(self.url) else os.path.normpath(self.url)

    def file(self, name: str) -> File:
        """A file in it, `graph_1/0/add.npy` for instance; it need not exist."""
        return File(f"{self.url.rstrip('/')}/{name}")

    def folder(self, name: str) -> Folder:
        """A folder in it; it need not exist."""
        return Folder(f"{self.url.rstrip('/')}/{name}")

    def absolute(self) -> Folder:
        """The same for a process that is in another folder."""
        return self if is_remote(self.url) else Folder(os.path.abspath(self.url))

    def parent(self) -> Folder:
        """The local folder that it is in."""
        return Folder(os.path.normpath(os.path.join(self.url, os.pardir)))

    def exists(self) -> bool:
        """Whether something is at its path; not known of URLs, which have no empty folders."""
        return not is_remote(self.url) and os.path.exists(self.url)

    def is_file(self) -> bool:
        """Whether it is a local file."""
        return not is_remote(self.url) and os.path.isfile(self.url)

    def entries(self) -> list[Entry]:
        """What is in it, by name; nothing if it does not exist or is a file."""
        found = self._remote_entries() if is_remote(self.url) else self._local_entries()
        return sorted(found, key=lambda entry: entry.name)

    def _local_entries(self) -> list[Entry]:
        try:
            with os.scandir(self.url) as listed:
                return [_local_entry(entry) for entry in listed]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remote_entries(self) -> list[Entry]:
        url_to_fs = need("fsspec.core").url_to_fs
        try:
            filesystem, path = url_to_fs(self.url)
            found = filesystem.ls(path, detail=True) if filesystem.isdir(path) else []
        except Exception as error:  # each protocol has its own
            raise _unreadable(self.url, error) from error
        return [
            Entry(
                str(facts["name"]).rstrip("/").rpartition("/")[2],
                facts["type"] == "directory",
                int(facts.get("size") or 0),
            )
            for facts in found
        ]


def _unreadable(url: str, error: Exception) -> OSError:
    return OSError(f"cannot read {url}: {type(error).__name__}: {error}")


def _local_entry(entry: os.DirEntry[str]) -> Entry:
    if entry.is_dir():
        return Entry(entry.name, True, 0)
    facts = entry.stat()
    return Entry(entry.name, False, facts.st_size, (facts.st_dev, facts.st_ino))


class _Header(NamedTuple):
    """What an `.npy` file says of its array, and where the array begins."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


_MOST_HEADERS = 256  # bytes that nearly all headers have room in


def _header(path: str) -> _Header:
    """The header of a file that is whole, apart from the values in it."""
    with open(path, "rb", buffering=0) as stream:
        beginning = stream.read(_MOST_HEADERS)
        end = _end_of_header(beginning)
        if end > len(beginning):
            beginning += stream.read(end - len(beginning))
        size = os.fstat(stream.fileno()).st_size
    header = _parsed(beginning[:end])
    if header.dtype.hasobject:
        raise ValueError(f"{path} holds Python objects, which are not read")
    if size < header.offset + header.elements * header.dtype.itemsize:
        array = f"{header.elements} elements of {header.dtype}"
        raise ValueError(f"{path} is cut: its array has {array}")
    return header


def _end_of_header(beginning: bytes) -> int:
    major = beginning[6] if len(beginning) > 6 else 1
    last = 10 if major == 1 else 12  # of the header's length
    return last + int.from_bytes(beginning[8:last], "little")


@lru_cache(maxsize=4096)  # most files of a dump have one of few headers
def _parsed(header: bytes) -> _Header:
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    try:
        return _Header(*read(stream), stream.tell())
    except Exception as error:  # a header is a piece of Python, which can be wrong in any way
        raise ValueError(f"it has no header of an array: {error}") from error


def _mapped(path: str) -> Array:
    header = _header(path)
    if header.elements == 0:
        return np.zeros(header.shape, header.dtype)
    with open(path, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    order: Any = "F" if header.fortran else "C"
    array: Array = np.ndarray(header.shape, header.dtype, mapped, header.offset, order=order)
    return array
