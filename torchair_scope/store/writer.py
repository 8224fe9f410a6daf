"""Write the steps and calls of a graph: files first, then the record that names them."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torchair_scope.store import layout
from torchair_scope.store.arrays import (
    Array,
    Description,
    UnsavableTensorError,
    describe,
    number_array,
    to_numpy,
)
from torchair_scope.store.device import Transfers
from torchair_scope.store.manifest import Record, encode, plain

if TYPE_CHECKING:
    from torchair_scope.store.run import Run

# What the manifest needs to say that the disk is full.
ROOM_FOR_RECORDS = 256 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)

Mode = Literal["all", "input", "output"]
_OF_INPUTS = ("INPUT", "KWARG")


@dataclass(frozen=True)
class CallReport:
    """What a call has left in the dump, once its record is written.

    Args:
        folder: the rank folder.
        finished: whether the operator returned.
        tensors: how many tensors have a file.
        bytes: size of all its files.
        missing: the tensors without a file, as its record lists them.
    """

    folder: str
    finished: bool
    tensors: int
    bytes: int
    missing: list[Record]


class GraphDump:
    """One graph of a run: gives a `Step` for each of its runs. `Run.graph` makes it."""

    def __init__(
        self, run: Run, number: int, description: Record, kind: layout.GraphKind = "graph"
    ) -> None:
        self.number = number
        self.kind: layout.GraphKind = kind
        self._description = description
        self._start(run)

    def _start(self, run: Run) -> None:
        record: Record = {"record": "graph", "graph": self.number, "time": layout.time_stamp()}
        record["kind"] = self.kind
        with _guarded(run, run.rank_folder.manifest.path):
            run.rank_folder.append_header({**self._description, **record})
        self._steps = itertools.count()
        self._run = run

    def begin_step(self, number: int | None = None) -> Step:
        """Give the next step, numbered from 0; any thread may ask.

        In a forked child, this graph's steps go to the child's own run.

        **Arguments:**

        - `number`: the step's number, if the caller counts them, since some are not dumped.
        """
        run = self._run.in_this_process()
        if run is not self._run:
            with run.rank_folder.lock:
                if run is not self._run:
                    self._start(run)
        if number is None:
            number = next(self._steps)
        return Step(run, self.number, number, self.kind)


class Step:
    """One run of one graph; call `finish` when the graph returns. `GraphDump` makes it."""

    def __init__(self, run: Run, graph: int, number: int, kind: layout.GraphKind = "graph") -> None:
        self.run = run
        self.graph = graph
        self.number = number
        self.problems: list[str] = []
        self._stamp = layout.time_stamp()
        self._order = itertools.count()
        self._open: dict[int, Call] = {}
        self.transfers = Transfers()
        self._calls = self._files = self._bytes = 0
        self._missing = 0
        self._stopped: str | None = None
        self._skipped = True
        with _guarded(run, run.folder, self.problems):
            run.rank_folder.make_sure()
            self._skipped = self._is_skipped()
        self._name = layout.step_folder_name(graph, number, kind)
        self._folder = os.path.join(run.folder, self._name)

    def _is_skipped(self) -> bool:
        """Leave the last bytes of a full disk to the step records."""
        folder = self.run.rank_folder
        if not folder.disk_full or folder.room() >= ROOM_FOR_RECORDS:
            return False
        self.problems.append("not written: the disk is full")
        return True

    def begin_call(
        self,
        node: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        facts: Mapping[str, Any],
        mode: Mode = "all",
        report: Callable[[CallReport], None] | None = None,
    ) -> Call:
        """Save the arguments of one call; do it before the operator runs.

        **Arguments:**

        - `node`, `target`: `fx.Node.name` and the operator's name, as `aten.add.Tensor`.
        - `args`, `kwargs`: any tree of tensors and constants.
        - `facts`: further entries of the call's record, such as `scope`.
        - `mode`: which tensors get a file: `"all"`, `"input"` or `"output"`. The record
            describes the others as well.
        - `report`: is told once what is written of the call; not if its record cannot be.

        **Raises:** `OSError` if a file cannot be written and the run was opened with
        `on_error="raise"`; else nothing.
        """
        call = Call(self, next(self._order), node, target, facts, mode, report)
        self._calls += 1
        if not self._skipped:
            self._open[call.order] = call
            with _guarded(self.run, self._folder, self.problems):
                call.save_arguments(args, kwargs)
        return call

    def finish(self) -> None:
        """Write the step's record. A call that was begun and not finished is recorded as such.

        **Raises:** as `begin_call`.
        """
        with _guarded(self.run, self._folder, self.problems):
            self.transfers.wait()
        unfinished = list(self._open.values())
        with _guarded(self.run, self._folder, self.problems):
            for call in unfinished:
                call.record_unfinished()
        with _guarded(self.run, self.run.rank_folder.manifest.path):
            self.run.rank_folder.append(
                {
                    "record": "step",
                    "graph": self.graph,
                    "step": self.number,
                    "time": self._stamp,
                    "complete": not (self.problems or unfinished or self._missing),
                    "calls": self._calls,
                    "files": self._files,
                    "bytes": self._bytes,
                    "missing": self._missing,
                    "problems": list(dict.fromkeys(self.problems)),
                }
            )

    def write(self, name: str, array: Array) -> int | str:
        """Write one file and give its size; the reason if it is not there afterwards."""
        if self._stopped is not None:
            return self._stopped
        path = os.path.join(self._folder, name)
        try:
            self.run.rank_folder.check_owner()
            size = write_npy(self._folder, name, array)
        except OSError as error:
            number = error.errno or errno.EIO
            reason = os.strerror(number)
            if number in _FULL:
                self._stopped = reason
                self.run.rank_folder.disk_full = True
            self.problems.append(f"{self._name}/{name}: {reason}")
            _report(self.run, OSError(number, reason, path), path)
            return reason
        self._files += 1
        self._bytes += size
        return size

    def record_call(self, call: Call, record: Record) -> None:
        """Write a call's record; the call is no longer open."""
        self._open.pop(call.order, None)
        self._missing += len(record["missing"])
        self.run.rank_folder.append(record)

    def is_open(self, call: Call) -> bool:
        """Say whether a call waits for its result."""
        return call.order in self._open


class Call:
    """One execution of one node. `Step.begin_call` makes it; give the result to `finish`."""

    def __init__(
        self,
        step: Step,
        order: int,
        node: str,
        target: str,
        facts: Mapping[str, Any],
        mode: Mode,
        report: Callable[[CallReport], None] | None,
    ) -> None:
        self.order = order
        self._mode = mode
        self._report = report
        self._bytes = self._tensors = 0
        self._step = step
        self._stem = layout.call_stem(node, target)
        self._stamp = layout.time_stamp()
        self._files: dict[str, str] = {}
        self._missing: list[Record] = []
        self._record: Record = {
            "record": "call",
            "graph": step.graph,
            "step": step.number,
            "order": order,
            "node": node,
            "target": target,
            "time": self._stamp,
            **plain(dict(facts)),
        }
        if mode != "all":
            self._record["mode"] = mode

    def save_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the INPUT and KWARG files; `Step.begin_call` does it."""
        self._record["args"] = [self._save(value, "INPUT", i) for i, value in enumerate(args)]
        self._record["kwargs"] = {
            name: encode(value, layout.slot_name("KWARG", name), self._hand_over)
            for name, value in kwargs.items()
        }

    def finish(self, result: Any, mutated: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write the OUTPUT files of what the operator returned, then the call's record.

        **Arguments:**

        - `result`: what the operator returned.
        - `mutated`: the arguments, by name, that it has written to and did not return; their
          values after the call go to MUTATED files.

        **Raises:** as `Step.begin_call`.
        """
        step = self._step
        if not step.is_open(self):
            return
        with _guarded(step.run, step.run.folder, step.problems):
            if isinstance(result, tuple | list):
                for index, value in enumerate(result):
                    self._save_numbers(value, layout.slot_name("OUTPUT", index))
                self._record["outputs"] = encode(result, "OUTPUT", self._hand_over)
            else:
                self._record["outputs"] = self._save(result, "OUTPUT", 0)
            if mutated:
                self._record["mutated"] = {
                    name: encode(value, layout.slot_name("MUTATED", name), self._hand_over)
                    for name, value in mutated.items()
                }
        step.transfers.then(self._record_finished)

    def _record_finished(self) -> None:
        step = self._step
        with _guarded(step.run, step.run.rank_folder.manifest.path, step.problems):
            step.record_call(self, self._finished_record())
            self._tell(finished=True)

    def record_unfinished(self) -> None:
        """Write the record of a call whose operator did not return."""
        self._step.record_call(self, {**self._finished_record(), "unfinished": True})
        self._tell(finished=False)

    def _tell(self, *, finished: bool) -> None:
        if self._report is not None:
            folder = self._step.run.folder
            report = CallReport(folder, finished, self._tensors, self._bytes, self._missing)
            self._report(report)

    def _keeps(self, slot: str) -> bool:
        """Whether the mode wants a file for a slot."""
        return self._mode == "all" or (self._mode == "input") == slot.startswith(_OF_INPUTS)

    def _finished_record(self) -> Record:
        return {**self._record, "files": self._files, "missing": self._missing}

    def _save(self, value: Any, kind: str, index: int) -> Any:
        slot = layout.slot_name(kind, index)
        self._save_numbers(value, slot)
        return encode(value, slot, self._hand_over)

    def _save_numbers(self, value: Any, slot: str) -> None:
        """Write numbers as TorchAir does; the record has them as constants as well."""
        array = number_array(value) if self._keeps(slot) else None
        if array is not None:
            self._write(slot, array)
        elif isinstance(value, list | tuple | dict):
            members = value.values() if isinstance(value, dict) else value
            for index, member in enumerate(members):
                self._save_numbers(member, f"{slot}.{index}")

    def _hand_over(self, tensor: Any, slot: str) -> Description:
        """Take one tensor: the one place through which every tensor goes to the disk."""
        description = {"slot": slot, **describe(tensor)}
        if not self._keeps(slot):
            return description
        copy = self._step.transfers.start(tensor)
        if copy is None:
            self._write_tensor(tensor, slot)
        else:
            self._step.transfers.then(lambda: self._write_tensor(copy, slot))
        return description

    def _write_tensor(self, tensor: Any, slot: str) -> None:
        try:
            array = to_numpy(tensor)
        except UnsavableTensorError as error:
            self._missing.append({"slot": slot, "file": None, "reason": str(error)})
            self._step.run.rank_folder.say_once(
                str(error),
                f"{slot} of {self._record['node']} ({self._record['target']}, scope "
                f"{self._record.get('scope')}) is not saved: {error}. Later ones of this kind are "
                "listed in the manifest only",
            )
        else:
            self._tensors += self._write(slot, array)

    def _write(self, slot: str, array: Array) -> bool:
        name = layout.file_name(self._stem, slot, self._stamp)
        written = self._step.write(name, array)
        if isinstance(written, int):
            self._files[slot] = name
            self._bytes += written
            return True
        self._missing.append({"slot": slot, "file": name, "reason": written})
        return False


# Files

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


# Errors


@contextlib.contextmanager
def _guarded(run: Run, path: str, problems: list[str] | None = None) -> Iterator[None]:
    """Keep every failure of ours out of the model, unless the user asked for it."""
    try:
        yield
    except Exception as error:
        if problems is not None:
            problems.append(f"{type(error).__name__}: {error}")
        _report(run, error, path)


def _report(run: Run, error: Exception, path: str) -> None:
    if run.on_error == "raise":
        raise error
    run.rank_folder.say_once(
        "write",
        f"torchair_scope cannot write {getattr(error, 'filename', None) or path}: "
        f"{getattr(error, 'strerror', None) or repr(error)}. The model goes on, the dump in "
        f"{run.folder} is not complete; see its {layout.MANIFEST}",
    )
