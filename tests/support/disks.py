"""File systems that are small enough to fill up, and what happens in a folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from torchair_scope.store import saving


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size, as `1m`; the test is skipped where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def slowed(seconds: float) -> Iterator[None]:
    """A disk that takes so long for each file that has a content of its own."""
    write, make = saving.write_npy, saving.make_small

    def write_slowly(*args: Any) -> int:
        time.sleep(seconds)
        return write(*args)

    def make_slowly(folder: Any, files: Any) -> list[int] | None:
        time.sleep(seconds * sum(bool(file.content) for file in files))
        return make(folder, files)

    with (
        mock.patch.object(saving, "write_npy", write_slowly),
        mock.patch.object(saving, "make_small", make_slowly),
    ):
        yield


# Of <sys/inotify.h>.
_EVENTS = {0x2: "written", 0x80: "moved"}
_HEADER = struct.Struct("iIII")


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """What happens to the files of a folder, which is there at the end: "written" or "moved"."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    try:
        if libc.inotify_add_watch(descriptor, os.fsencode(folder), sum(_EVENTS)) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        events: list[tuple[str, str]] = []
        yield events
        data = os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)
    while data:
        _, mask, _, size = _HEADER.unpack_from(data)
        name = data[_HEADER.size : _HEADER.size + size].rstrip(b"\0")
        events.append((_EVENTS[mask], name.decode()))
        data = data[_HEADER.size + size :]
