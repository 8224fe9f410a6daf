"""Where the files of a dump come from: a local folder, or any URL that fsspec can read."""

from __future__ import annotations

import functools
import io
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

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

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file for reading."""
        if is_remote(self.url):
            with need("fsspec").open(self.url, "rb") as stream:
                yield stream
        else:
            with open(self.url, "rb") as stream:
                yield stream

    def read(self) -> bytes:
        """The whole file."""
        with self.open() as stream:
            return stream.read()

    def array(self) -> Array:
        """The array in an `.npy` file; a local file is mapped into memory, not read.

        **Raises:** `OSError` if it cannot be read, `ValueError` if it is cut or no array.
        """
        if not is_remote(self.url):
            return _mapped(self.url)
        with self.open() as stream:
            return np.asarray(np.load(io.BytesIO(stream.read()), allow_pickle=False))


@dataclass(frozen=True)
class Folder:
    """One folder, by its path or URL."""

    url: str

    @property
    def name(self) -> str:
        """Its own name, without the folders above it."""
        path = self.url if is_remote(self.url) else os.path.abspath(self.url)
        return path.rstrip("/").rpartition("/")[2]

    def file(self, name: str) -> File:
        """A file in it, `graph_1/0/add.npy` for instance; it need not exist."""
        return File(f"{self.url.rstrip('/')}/{name}")

    def folder(self, name: str) -> Folder:
        """A folder in it; it need not exist."""
        return Folder(f"{self.url.rstrip('/')}/{name}")

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
        filesystem, path = need("fsspec.core").url_to_fs(self.url)
        if not filesystem.isdir(path):
            return []
        return [
            Entry(
                str(facts["name"]).rstrip("/").rpartition("/")[2],
                facts["type"] == "directory",
                int(facts.get("size") or 0),
            )
            for facts in filesystem.ls(path, detail=True)
        ]


def _local_entry(entry: os.DirEntry[str]) -> Entry:
    if entry.is_dir():
        return Entry(entry.name, True, 0)
    facts = entry.stat()
    return Entry(entry.name, False, facts.st_size, (facts.st_dev, facts.st_ino))


def _mapped(path: str) -> Array:
    with open(path, "rb") as stream:
        shape, fortran, dtype = _header(stream)
        offset = stream.tell()
        if dtype.hasobject:
            raise ValueError(f"{path} holds Python objects, which are not read")
        count = math.prod(shape)
        if os.fstat(stream.fileno()).st_size < offset + count * dtype.itemsize:
            raise ValueError(f"{path} is cut: its array has {count} elements of {dtype}")
        if count == 0:
            return np.zeros(shape, dtype)
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(shape, dtype, mapped, offset, order="F" if fortran else "C")


Header = tuple[tuple[int, ...], bool, np.dtype[Any]]


def _header(stream: IO[bytes]) -> Header:
    """Read the header of an `.npy` file; a dump has many files, and few different headers."""
    version = np.lib.format.read_magic(stream)
    width = 2 if version == (1, 0) else 4
    length = stream.read(width)
    return _parsed_header(version, length + stream.read(int.from_bytes(length, "little")))


@functools.lru_cache(1024)
def _parsed_header(version: tuple[int, int], text: bytes) -> Header:
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    return read(io.BytesIO(text))
