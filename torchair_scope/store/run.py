"""The rank folder of this process: who owns it, what happens to an earlier run's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, Literal

import numpy as np
import torch

from torchair_scope.store import layout, process
from torchair_scope.store.budget import Disk
from torchair_scope.store.contents import Contents, Links
from torchair_scope.store.identity import Known
from torchair_scope.store.manifest import Manifest, Record, plain
from torchair_scope.store.open_steps import OpenSteps
from torchair_scope.store.sections import settle_before_termination
from torchair_scope.store.writer import GraphDump

OnError = Literal["warn", "raise"]

FORMAT = 1
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


class DumpWarning(UserWarning):
    """Something of a dump is not where, or not all of what, the user expects."""


class RankFolder:
    """The folder that this process alone writes to, with its manifest.

    Attributes:
        path: the folder, absolute.
        manifest: its manifest.
        known: the values that were handed over, by the memory that they lie in.
        measured: the same for those that were measured.
        contents: the values that are on disk.
        links: what makes further names for them.
        steps: those that are not complete.
        disk: how much is free on it.
        disk_full: whether a file could not be written for want of space.
    """

    def __init__(self, base: str, rank: int, world_size: int) -> None:
        self.base = base
        self.pid = os.getpid()
        self.disk_full = False
        self.steps = OpenSteps()
        self.disk = Disk(self.room)
        self._said: set[str] = set()
        self.lock = threading.RLock()
        self._header: list[Record] = [_run_record(rank, world_size)]
        self._wanted = os.path.join(base, layout.rank_folder_name(rank, world_size))
        self._set_path(self._wanted)

    def _set_path(self, path: str) -> None:
        self.path = path
        self.manifest = Manifest(os.path.join(path, layout.MANIFEST))
        self.known = Known()
        self.measured = Known()
        self.contents = Contents()
        self.links = Links()

    def make_sure(self) -> None:
        """Claim the folder and start its manifest, unless that is done.

        A user may delete the dump between two runs in one process: what follows then goes to a
        dump that has all of its records.

        **Raises:** `OSError` if the folder or the manifest cannot be made.
        """
        with self.lock:
            self.check_owner()
            if self.manifest.is_in_place():
                return
            self.manifest.close()
            _make_base(self.base)
            with _naming_permission(self.base), _exclusive(self.base):
                self._set_path(_claim(self._wanted))
                layout.make_folders(self.path)
                for record in self._header:
                    self.append(record)

    def append(self, *records: Record) -> None:
        """Write records; `OSError` if that is not possible now."""
        self.check_owner()
        self.manifest.append(*records)

    def append_header(self, record: Record) -> None:
        """Write a record that later ones refer to."""
        self._header.append(record)
        self.append(record)

    def check_owner(self) -> None:
        """Raise `OSError` in a forked child of the process that the folder belongs to."""
        if process.number() != self.pid:
            raise OSError(
                errno.EPERM,
                f"process {process.number()} does not write to its parent's dump",
                self.path,
            )

    def room(self) -> int:
        """Bytes that this process may still write to the disk."""
        facts = os.statvfs(self.path if os.path.isdir(self.path) else self.base)
        return facts.f_bavail * facts.f_frsize

    def say_once(self, key: str, message: str) -> None:
        """Warn, unless a warning with this key was given for this folder."""
        with self.lock:
            if key in self._said:
                return
            self._said.add(key)
        warnings.warn(message, DumpWarning, stacklevel=3)


class Run:
    """One process's dump. `open_run` gives it."""

    def __init__(self, rank_folder: RankFolder, on_error: OnError) -> None:
        self.rank_folder = rank_folder
        self.on_error = on_error

    @property
    def folder(self) -> str:
        """The rank folder, absolute."""
        return self.rank_folder.path

    def graph(
        self, number: int, description: dict[str, Any], kind: layout.GraphKind = "graph"
    ) -> GraphDump:
        """Record a graph and give the object that dumps its steps.

            >>> from torchair_scope.store.run import open_run
            >>> graph_dump = open_run("./dump").graph(1, {"direction": "forward", "nodes": []})
            >>> graph_dump.number
            1

        **Arguments:**

        - `number`: the graph's number, counted from 1 in this process.
        - `description`: facts for the record; what JSON has no words for is kept as text.
        - `kind`: what the folder's name begins with, `"graph"` or `"eager"`.
        """
        return GraphDump(self, number, plain(description), kind)

    def in_this_process(self) -> Run:
        """Give this run, or in a forked child the child's own: it never writes to its parent's."""
        if process.number() == self.rank_folder.pid:
            return self
        return open_run(self.rank_folder.base, self.on_error)


_runs: dict[tuple[str, str, OnError], Run] = {}
_folders: dict[tuple[str, str], RankFolder] = {}
_runs_lock = threading.Lock()


def _forget_runs() -> None:
    """A forked child has no run yet, and its copy of the lock may be held by no one."""
    global _runs_lock
    _runs_lock = threading.Lock()
    _runs.clear()
    _folders.clear()


os.register_at_fork(after_in_child=_forget_runs)


def open_run(path: str | os.PathLike[str] | None = None, on_error: OnError = "warn") -> Run:
    """Give this process's run in a dump folder; the same one whenever it is asked for.

        >>> import os, torch
        >>> from torchair_scope.store.run import open_run
        >>> run = open_run("./dump")
        >>> os.path.basename(run.folder)
        'worldsize1_global_rank0'
        >>> x = torch.ones(3)
        >>> step = run.graph(1, {"direction": "inference"}).begin_step()
        >>> call = step.begin_call("add", "aten.add.Tensor", (x, 1), {}, {})
        >>> call.finish(x + 1)
        >>> step.finish()
        >>> len(os.listdir(os.path.join(run.folder, "graph_1", "0")))
        3

    The rank folder of an earlier run is moved aside, with a warning; that of a process which still
    runs is left alone, and this one writes beside it, with a warning.

    **Arguments:**

    - `path`: the dump folder; made if missing. The current folder if None.
    - `on_error`: `"warn"` says once that something could not be written and goes on; `"raise"`
        raises the `OSError`.

    **Raises:** `NotADirectoryError` if `path` is a file, `PermissionError` if it cannot be written
    to, `ValueError` for an unknown `on_error` or for a rank in the environment that is none.
    """
    if on_error not in ("warn", "raise"):
        raise ValueError(f"on_error={on_error!r}: expected 'warn' or 'raise'")
    base = os.path.realpath(os.fspath(path) if path is not None else ".")
    rank, world_size = layout.rank_and_world_size()
    name = layout.rank_folder_name(rank, world_size)
    with _runs_lock:
        if (base, name) not in _folders:
            _folders[base, name] = RankFolder(base, rank, world_size)
        run = _runs.setdefault((base, name, on_error), Run(_folders[base, name], on_error))
    settle_before_termination(_settle_before_termination)
    try:
        run.rank_folder.make_sure()
    except (NotADirectoryError, PermissionError):
        raise
    except OSError as error:
        if on_error == "raise":
            raise
        run.rank_folder.say_once("write", f"torchair_scope cannot start a dump in {base}: {error}")
    return run


def open_folders() -> list[RankFolder]:
    """The rank folders that this process has opened."""
    with _runs_lock:
        return list(_folders.values())


def complete_steps() -> None:
    """Complete all steps whose graphs have returned: their files are there, or known not to be."""
    for folder in open_folders():
        if folder.pid == os.getpid():
            folder.steps.complete()


def _settle_before_termination() -> None:
    """Write all that was handed over, and what is known of steps that will not end."""
    for folder in list(_folders.values()):
        with contextlib.suppress(Exception):
            folder.steps.complete()
            folder.steps.settle()


# Claiming the folder


def _claim(folder: str) -> str:
    """Say which folder is this process's, after moving an earlier run's aside."""
    if not os.path.lexists(folder):
        return folder
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "is a file, but the dump needs this name", folder)
    if not os.listdir(folder):
        return folder
    owner = _read_run_record(folder)
    if _may_be_running(owner):
        own = layout.free_name(f"{folder}.pid{os.getpid()}")
        warnings.warn(
            f"{folder} belongs to process {owner['pid']} on {owner['host']}, which may still be "
            f"writing to it; this process dumps to {own}",
            DumpWarning,
            stacklevel=5,
        )
        return own
    aside = layout.free_name(f"{folder}.{_time_of_run(folder, owner)}")
    os.rename(folder, aside)
    warnings.warn(
        f"{folder} held the dump of an earlier run; it is now {aside}", DumpWarning, stacklevel=5
    )
    return folder


def _read_run_record(folder: str) -> Record:
    """Give the run record of a folder, or an empty one for a dump that has none."""
    try:
        with open(os.path.join(folder, layout.MANIFEST), encoding="utf-8") as manifest:
            record = json.loads(manifest.readline())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("record") == "run" else {}


def _may_be_running(owner: Record) -> bool:
    """Say whether a run's process is alive; one on another host is taken to be."""
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return False
    if owner.get("host") != socket.gethostname():
        return True
    if os.path.exists("/proc/self/stat"):
        started = _process_start(pid)
        return started is not None and started == owner.get("process_start")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _process_start(pid: int) -> int | None:
    """Give the start of a process in clock ticks since boot; None if it has ended or is unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _time_of_run(folder: str, owner: Record) -> str:
    start = owner.get("time")
    if isinstance(start, str) and re.fullmatch(r"\d{20}", start):
        return start
    changed = datetime.fromtimestamp(os.stat(folder).st_mtime, timezone.utc)
    return changed.strftime("%Y%m%d%H%M%S%f")


@contextlib.contextmanager
def _exclusive(base: str) -> Iterator[None]:
    """Let one process at a time look at the rank folders of `base` and rename them."""
    descriptor = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Some network file systems have no locks; ranks have folders of their own there, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_base(base: str) -> None:
    try:
        with _naming_permission(base):
            layout.make_folders(base)
    except NotADirectoryError as error:
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"cannot dump to {base}: {error.filename} is a file; set the dump path to a folder",
            base,
        ) from None


@contextlib.contextmanager
def _naming_permission(base: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_PERMISSION:
            raise
        raise PermissionError(
            errno.EACCES,
            f"cannot dump to {base}: no permission to write to {error.filename or base}; "
            "set the dump path to a folder that this process may write to",
            base,
        ) from error


def _run_record(rank: int, world_size: int) -> Record:
    return {
        "record": "run",
        "format": FORMAT,
        "time": layout.time_stamp(),
        "rank": rank,
        "world_size": world_size,
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "host": socket.gethostname(),
        "command": list(sys.orig_argv),
        "versions": _versions(),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "torchair_scope": None,
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torchair_scope"] = importlib.metadata.version("torchair_scope")
    npu = sys.modules.get("torch_npu")
    if npu is not None:
        versions["torch_npu"] = str(getattr(npu, "__version__", None))
    return versions
