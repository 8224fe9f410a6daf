"""Write the steps and calls of a graph: files first, then the record that names them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torchair_scope.store import layout
from torchair_scope.store.arrays import Description, describe, number_array
from torchair_scope.store.failures import guarded
from torchair_scope.store.files import Files
from torchair_scope.store.keeper import Keeper
from torchair_scope.store.manifest import Record, encode, plain

if TYPE_CHECKING:
    from torchair_scope.store.run import Run

# What the manifest needs to say that the disk is full.
ROOM_FOR_RECORDS = 256 * 1024

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
        with guarded(run, run.rank_folder.manifest.path):
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
    """One run of one graph; call `finish` when the graph returns. `GraphDump` makes it.

    Attributes:
        files: the keeper that saves values as files; calls have it unless they are given another.
        folder: of its files.
        problems: what went wrong, a sentence each, for its record.
    """

    def __init__(self, run: Run, graph: int, number: int, kind: layout.GraphKind = "graph") -> None:
        self.run = run
        self.graph = graph
        self.number = number
        self.problems: list[str] = []
        self._stamp = layout.time_stamp()
        self._order = itertools.count()
        self._open: dict[int, Call] = {}
        self._calls = self._files = self._bytes = 0
        self._missing = 0
        self._skipped = True
        with guarded(run, run.folder, self.problems):
            run.rank_folder.make_sure()
            self._skipped = self._is_skipped()
        self.name = layout.step_folder_name(graph, number, kind)
        self.folder = os.path.join(run.folder, self.name)
        self.files = Files(self)
        self._keepers: list[Keeper] = [self.files]

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
        keeper: Keeper | None = None,
    ) -> Call:
        """Save the arguments of one call; do it before the operator runs.

        **Arguments:**

        - `node`, `target`: `fx.Node.name` and the operator's name, as `aten.add.Tensor`.
        - `args`, `kwargs`: any tree of tensors and constants.
        - `facts`: further entries of the call's record, such as `scope`.
        - `mode`: which tensors are kept: `"all"`, `"input"` or `"output"`. The record
            describes the others as well.
        - `report`: is told once what is written of the call; not if its record cannot be.
        - `keeper`: what takes the call's tensors; the step's `files` if None.

        **Raises:** `OSError` if a file cannot be written and the run was opened with
        `on_error="raise"`; else nothing.
        """
        keeper = self.files if keeper is None else keeper
        if keeper not in self._keepers:
            self._keepers.append(keeper)
        call = Call(self, next(self._order), node, target, facts, mode, report, keeper)
        self._calls += 1
        if not self._skipped:
            self._open[call.order] = call
            with guarded(self.run, self.folder, self.problems):
                call.save_arguments(args, kwargs)
        return call

    def finish(self) -> None:
        """Write the step's record. A call that was begun and not finished is recorded as such.

        **Raises:** as `begin_call`.
        """
        for keeper in self._keepers:
            with guarded(self.run, self.folder, self.problems):
                keeper.finish()
        unfinished = list(self._open.values())
        with guarded(self.run, self.folder, self.problems):
            for call in unfinished:
                call.record_unfinished()
        with guarded(self.run, self.run.rank_folder.manifest.path):
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

    def has_file(self, size: int) -> None:
        """Count a file of the step."""
        self._files += 1
        self._bytes += size

    def record_call(self, call: Call, record: Record) -> None:
        """Write a call's record; the call is no longer open."""
        self._open.pop(call.order, None)
        self._missing += len(record["missing"])
        self.run.rank_folder.append(record)

    def is_open(self, call: Call) -> bool:
        """Say whether a call waits for its result."""
        return call.order in self._open


class Call:
    """One execution of one node. `Step.begin_call` makes it; give the result to `finish`.

    Its record is written once it is finished and no slot is promised any more.

    Attributes:
        step: the step that it belongs to.
        node: `fx.Node.name`.
        target: the operator, as `aten.add.Tensor`.
        stem: what the names of its files begin with.
        stamp: the time in the names of its files.
        facts: what the record says besides, such as `scope`; a keeper may add entries.
    """

    def __init__(
        self,
        step: Step,
        order: int,
        node: str,
        target: str,
        facts: Mapping[str, Any],
        mode: Mode,
        report: Callable[[CallReport], None] | None,
        keeper: Keeper,
    ) -> None:
        self.order = order
        self.step = step
        self.node = node
        self.target = target
        self.stem = layout.call_stem(node, target)
        self.stamp = layout.time_stamp()
        self.facts: Record = plain(dict(facts))
        if mode != "all":
            self.facts["mode"] = mode
        self._mode = mode
        self._report = report
        self._keeper = keeper
        self._bytes = self._tensors = 0
        self._values: Record = {}
        self._files: dict[str, str] = {}
        self._missing: list[Record] = []
        self._promised: set[str] = set()
        self._is_finished = False

    def save_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hand the INPUT and KWARG values over; `Step.begin_call` does it."""
        self._values["args"] = [self._save(value, "INPUT", i) for i, value in enumerate(args)]
        self._values["kwargs"] = {
            name: encode(value, layout.slot_name("KWARG", name), self._hand_over)
            for name, value in kwargs.items()
        }

    def finish(self, result: Any, mutated: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Hand over what the operator returned; the call's record follows.

        **Arguments:**

        - `result`: what the operator returned.
        - `mutated`: the arguments, by name, that it has written to and did not return; their
          values after the call go to MUTATED files.

        **Raises:** as `Step.begin_call`.
        """
        step = self.step
        if not step.is_open(self):
            return
        with guarded(step.run, step.run.folder, step.problems):
            if isinstance(result, tuple | list):
                for index, value in enumerate(result):
                    self._save_numbers(value, layout.slot_name("OUTPUT", index))
                self._values["outputs"] = encode(result, "OUTPUT", self._hand_over)
            else:
                self._values["outputs"] = self._save(result, "OUTPUT", 0)
            if mutated:
                self._values["mutated"] = {
                    name: encode(value, layout.slot_name("MUTATED", name), self._hand_over)
                    for name, value in mutated.items()
                }
        self._is_finished = True
        self._record_if_done()

    def _record_if_done(self) -> None:
        step = self.step
        if not self._is_finished or self._promised or not step.is_open(self):
            return
        with guarded(step.run, step.run.rank_folder.manifest.path, step.problems):
            step.record_call(self, self._record())
            self._tell(finished=True)

    def record_unfinished(self) -> None:
        """Write the record of a call whose operator did not return."""
        self.step.record_call(self, {**self._record(), "unfinished": True})
        self._tell(finished=False)

    def _tell(self, *, finished: bool) -> None:
        if self._report is not None:
            folder = self.step.run.folder
            report = CallReport(folder, finished, self._tensors, self._bytes, self._missing)
            self._report(report)

    def _record(self) -> Record:
        return {
            "record": "call",
            "graph": self.step.graph,
            "step": self.step.number,
            "order": self.order,
            "node": self.node,
            "target": self.target,
            "time": self.stamp,
            **self.facts,
            **self._values,
            "files": self._files,
            "missing": self._missing,
        }

    # What becomes of a slot, as its keeper says

    def promise(self, slot: str) -> None:
        """The slot will have a file, or be missing, later: the call's record waits for it."""
        self._promised.add(slot)

    def has_file(self, slot: str, name: str, size: int, *, is_tensor: bool = True) -> None:
        """The slot has a file of that name in the step's folder, with `size` bytes."""
        self._files[slot] = name
        self._bytes += size
        self._tensors += is_tensor
        self.step.has_file(size)
        self._settle(slot)

    def is_missing(self, slot: str, reason: str, name: str | None = None) -> None:
        """The slot has no file; `name` is the one that could not be written, if it got so far."""
        self._missing.append({"slot": slot, "file": name, "reason": reason})
        self._settle(slot)

    def _settle(self, slot: str) -> None:
        if slot in self._promised:
            self._promised.discard(slot)
            self._record_if_done()

    # Values on their way to the keeper

    def _wants(self, slot: str) -> bool:
        """Whether the mode wants a slot to be kept."""
        return self._mode == "all" or (self._mode == "input") == slot.startswith(_OF_INPUTS)

    def _save(self, value: Any, kind: str, index: int) -> Any:
        slot = layout.slot_name(kind, index)
        self._save_numbers(value, slot)
        return encode(value, slot, self._hand_over)

    def _save_numbers(self, value: Any, slot: str) -> None:
        """Write numbers as TorchAir does; the record has them as constants as well."""
        array = number_array(value) if self._wants(slot) else None
        if array is not None:
            self._keeper.keep_numbers(self, slot, array)
        elif isinstance(value, list | tuple | dict):
            members = value.values() if isinstance(value, dict) else value
            for index, member in enumerate(members):
                self._save_numbers(member, f"{slot}.{index}")

    def _hand_over(self, tensor: Any, slot: str) -> Description:
        """Give one tensor to the keeper: the one place through which every tensor goes."""
        description = {"slot": slot, **describe(tensor)}
        if self._wants(slot):
            self._keeper.keep_tensor(self, slot, tensor, description)
        return description
