"""Write the steps and calls of a graph: files first, then the record that names them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torchair_scope.store import layout
from torchair_scope.store.arrays import Description, describe, number_array
from torchair_scope.store.choice import Choice, Chosen
from torchair_scope.store.failures import Guarded
from torchair_scope.store.files import Files, Pace
from torchair_scope.store.keeper import Keeper
from torchair_scope.store.manifest import Record, encode
from torchair_scope.store.sections import in_section, section
from torchair_scope.store.statistics_table import StatisticsTable

if TYPE_CHECKING:
    from torchair_scope.store.run import Run

# What the manifest needs to say that the disk is full.
ROOM_FOR_RECORDS = 256 * 1024
# How long the record of a call may wait for others, and for how many, to be written with them.
_SECONDS_UNRECORDED = 0.5
_RECORDED_TOGETHER = 32

Mode = Literal["all", "input", "output"]
_OF_INPUTS = ("INPUT", "KWARG")


class CallReport(NamedTuple):
    """What a call has left in the dump, once its record is written.

    Attributes:
        folder: the rank folder.
        finished: whether the operator returned.
        tensors: how many tensors have a file.
        bytes: size of all its files.
        statistics: of how many tensors there is a row in `stats.csv`.
        missing: the tensors without what was to be kept of them, as its record lists them.
        is_triggered: whether it is to be saved; else it may be told once more.
    """

    folder: str
    finished: bool
    tensors: int
    bytes: int
    statistics: int
    missing: list[Record]
    is_triggered: bool = True


class GraphDump:
    """One graph of a run: gives a `Step` for each of its runs. `Run.graph` makes it."""

    def __init__(
        self, run: Run, number: int, description: Record, kind: layout.GraphKind = "graph"
    ) -> None:
        self.number = number
        self.kind: layout.GraphKind = kind
        self._description = description
        self._start(run)

    @property
    def run(self) -> Run:
        """The run that it belongs to."""
        return self._run

    def _start(self, run: Run) -> None:
        record: Record = {"record": "graph", "graph": self.number, "time": layout.time_stamp()}
        record["kind"] = self.kind
        with Guarded(run, run.rank_folder.manifest.path):
            run.rank_folder.append_header({**self._description, **record})
        self._steps = itertools.count()
        self._run = run

    def begin_step(self, number: int | None = None, pace: Pace = Pace()) -> Step:  # noqa: B008
        """Give the next step, numbered from 0; any thread may ask.

        In a forked child, this graph's steps go to the child's own run.

        **Arguments:**

        - `number`: the step's number, if the caller counts them, since some are not dumped.
        - `pace`: how the writing of the step goes along with its run.
        """
        run = self._run.in_this_process()
        if run is not self._run:
            with run.rank_folder.lock:
                if run is not self._run:
                    self._start(run)
        if number is None:
            number = next(self._steps)
        return Step(run, self.number, number, self.kind, pace)


class Step:
    """One run of one graph; call `finish` when the graph returns. `GraphDump` makes it.

    Attributes:
        files: the keeper that saves values as files.
        statistics: the keeper that measures them.
        folder: of its files.
        problems: what went wrong, a sentence each, for its record.
    """

    def __init__(
        self, run: Run, graph: int, number: int, kind: layout.GraphKind, pace: Pace
    ) -> None:
        self.run = run
        self.graph = graph
        self.number = number
        self.lock = threading.RLock()
        self.problems: list[str] = []
        self._stamp = layout.time_stamp()
        self._order = itertools.count()
        self._open: dict[int, Call] = {}
        self._done: list[Call] = []
        self._flushed = time.monotonic()
        self._untold: list[Callable[[], None]] = []
        self._counts = {"files": 0, "bytes": 0, "written": 0, "statistics": 0, "missing": 0}
        self._calls = 0
        self._skipped = True
        self._steps = run.rank_folder.steps
        self._steps.begins(self)
        with Guarded(run, run.folder, self.problems):
            run.rank_folder.make_sure()
            self._skipped = self._is_skipped()
        self.name = layout.step_folder_name(graph, number, kind)
        self.folder = os.path.join(run.folder, self.name)
        self._lag = pace.lag
        self.files = Files(self, pace)
        self.statistics = StatisticsTable(self, pace)
        self._chosen: dict[Choice, Chosen] = {}

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
        choice: Choice | None = None,
        order: int | None = None,
    ) -> Call:
        """Save the arguments of one call; do it before the operator runs.

        **Arguments:**

        - `node`, `target`: `fx.Node.name` and the operator's name, as `aten.add.Tensor`.
        - `args`, `kwargs`: any tree of tensors and constants.
        - `facts`: further entries of the call's record, such as `scope`, as JSON.
        - `mode`: which tensors are kept: `"all"`, `"input"` or `"output"`. The record
            describes the others as well.
        - `report`: is told once what is written of the call; not if its record cannot be.
        - `choice`: what is kept of its tensors; if None, a file for each.
        - `order`: its position in the step, if the caller counts.

        **Raises:** `OSError` if a file cannot be written and the run was opened with
        `on_error="raise"`; else nothing.
        """
        with section:
            keeper = self._keeper(choice)
            order = next(self._order) if order is None else order
            call = Call(self, order, node, target, facts, mode, report, keeper)
            self._calls += 1
            if not self._skipped:
                with self.lock:
                    self._open[call.order] = call
                with Guarded(self.run, self.folder, self.problems):
                    call.save_arguments(args, kwargs)
            self._tell()
        return call

    def _keeper(self, choice: Choice | None) -> Keeper:
        if choice is None:
            return self.files
        if choice not in self._chosen:
            self._chosen[choice] = Chosen(self, choice)
        return self._chosen[choice]

    def finish(self) -> None:
        """The graph has returned: complete the step, or with `lag=1` the one before.

        A call that was begun and not finished is recorded as such.

        **Raises:** as `begin_call`.
        """
        if in_section():  # Called by a finaliser, in the middle of the store's own work.
            self._steps.has_returned(self)
            return
        with section, Guarded(self.run, self.folder, self.problems):
            self.run.rank_folder.check_owner()
            if not self._lag:
                self._steps.has_returned(self)
                self._steps.complete()
                return
            try:
                self.files.let_go()
                self._steps.complete()
            finally:
                self._steps.has_returned(self)

    def complete(self) -> None:
        """Wait until everything is settled, and write the step's record."""
        with contextlib.ExitStack() as stack:  # Each is done even if another one raises.
            stack.callback(self._tell)
            stack.callback(self._write_record)
            for keeper in (self.statistics, self.files):
                stack.callback(self._end, keeper)

    def _end(self, keeper: Keeper) -> None:
        with Guarded(self.run, self.folder, self.problems):
            keeper.finish()

    def _write_record(self) -> None:
        with self.lock:
            unfinished = list(self._open.values())
        for call in unfinished:
            call.ends_unfinished()
        manifest = self.run.rank_folder.manifest.path
        with Guarded(self.run, manifest, self.problems):
            self.flush()
        complete = not (self.problems or unfinished or self._counts["missing"])
        record = {
            "record": "step",
            "graph": self.graph,
            "step": self.number,
            "time": self._stamp,
            "complete": complete,
            "calls": self._calls,
            **self._counts,
            "problems": list(dict.fromkeys(self.problems)),
        }
        with Guarded(self.run, manifest):
            self.run.rank_folder.append(record)

    def is_done(self, call: Call) -> None:
        """Nothing of a call is awaited any more: its record is due, with others."""
        with self.lock:
            self._open.pop(call.order, None)
            self._done.append(call)

    def flush_if_due(self) -> None:
        """Write the records of the calls that are done, if they are many or have waited."""
        waited = time.monotonic() - self._flushed
        if len(self._done) < _RECORDED_TOGETHER and waited < _SECONDS_UNRECORDED:
            return
        try:
            self.flush()
        except OSError as error:  # The record is kept, and written with the next ones.
            self.problems.append(f"{type(error).__name__}: {error}")

    def flush(self) -> None:
        """Write the records of the calls that are done."""
        with self.lock:
            done, self._done = self._done, []
            self._flushed = time.monotonic()
            for call in done:
                for fact, count in call.counts().items():
                    self._counts[fact] += count
        if done:  # Nothing changes them any more, and the model is not kept waiting.
            self.run.rank_folder.append(*(call.record() for call in done))
            self._untold += [call.tell for call in done]

    def _tell(self) -> None:
        """Report the calls that are recorded, on the thread that runs the model."""
        while self._untold:
            self._untold.pop(0)()

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
        self.facts: Record = dict(facts)
        if mode != "all":
            self.facts["mode"] = mode
        self._mode = mode
        self._report = report
        self._keeper = keeper
        self._values: Record = {}
        self._files: dict[str, str] = {}
        self._contents: dict[str, int] = {}
        self._missing: list[Record] = []
        self._bytes = self._written = self._tensors = 0
        self._statistics: list[str] = []
        self._when_written: dict[str, Callable[[int], None]] = {}
        self._promised: set[str] = set()
        self._slots: dict[str, None] = {}  # in the order in which they were handed over
        self._has_returned = False

    def save_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hand the INPUT and KWARG values over; `Step.begin_call` does it."""
        self.step.files.check()
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
        with section:
            with Guarded(step.run, step.run.folder, step.problems):
                self._save_results(result, mutated)
            with step.lock:
                self._has_returned = True
                is_done = self._look_if_done()
            if is_done:
                step.flush_if_due()

    def _save_results(self, result: Any, mutated: Mapping[str, Any]) -> None:
        self.step.files.check()
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

    def _look_if_done(self) -> bool:
        if self._promised or not self._has_returned or not self.step.is_open(self):
            return False
        self.step.is_done(self)
        return True

    def ends_unfinished(self) -> None:
        """The step ends, and the operator did not return, or a slot was never settled."""
        for slot in [slot for slot in self._slots if slot in self._promised]:
            self.is_missing(slot, "the run was interrupted before it was written")
        if self.step.is_open(self):
            self.step.is_done(self)

    def tell(self) -> None:
        """Report what is written of the call."""
        if self._report is not None:
            folder = self.step.run.folder
            finished = self._has_returned
            kept = self._tensors, self._bytes, len(self._statistics)
            self._report(CallReport(folder, finished, *kept, self._missing))

    def counts(self) -> dict[str, int]:
        """What the call adds to the numbers of its step's record."""
        return {
            "files": len(self._files),
            "bytes": self._bytes,
            "written": self._written,
            "statistics": len(self._statistics),
            "missing": len(self._missing),
        }

    def record(self) -> Record:
        """The call's record."""
        order = list(self._slots)
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
            "files": {slot: self._files[slot] for slot in order if slot in self._files},
            "contents": {slot: self._contents[slot] for slot in order if slot in self._contents},
            **({"statistics": self._statistics} if self._statistics else {}),
            "missing": sorted(self._missing, key=lambda lost: order.index(lost["slot"])),
            **({} if self._has_returned else {"unfinished": True}),
        }

    # What becomes of a slot, as its keeper says

    def promise(self, slot: str) -> None:
        """The slot will have a file, or be missing, later: the call's record waits for it."""
        self._promised.add(slot)
        self._slots[slot] = None

    def has_file(
        self,
        slot: str,
        name: str,
        size: int,
        *,
        is_tensor: bool = True,
        written: int | None = None,
        content: int | None = None,
    ) -> None:
        """The slot has a file in the step's folder.

        **Arguments:**

        - `slot`, `name`: which slot, and the file's name.
        - `size`: bytes of the file.
        - `is_tensor`: whether it holds a tensor, and not numbers.
        - `written`: bytes that had to be written for it, 0 for a link; the size if None.
        - `content`: the number of its content: files of one rank folder with equal numbers have
            equal bytes.
        """
        with self.step.lock:
            self._slots[slot] = None
            self._files[slot] = name
            if content is not None:
                self._contents[slot] = content
            self._bytes += size
            self._written += size if written is None else written
            self._tensors += is_tensor
            is_done = self._settle(slot, size if written is None else written)
        if is_done:
            self.step.flush_if_due()

    def is_missing(self, slot: str, reason: str, name: str | None = None) -> None:
        """The slot has no file; `name` is the one that could not be written, if it got so far."""
        with self.step.lock:
            if slot not in (lost["slot"] for lost in self._missing):
                self._slots[slot] = None
                self._missing.append({"slot": slot, "file": name, "reason": reason})
            is_done = self._settle(slot, 0)
        if is_done:
            self.step.flush_if_due()

    def has_statistics(self, slot: str) -> None:
        """The slot has a row of statistics."""
        with self.step.lock:
            self._statistics.append(slot)

    def when_written(self, slot: str, tell: Callable[[int], None]) -> None:
        """Have something told how many bytes are written for a slot, 0 if it has no file."""
        self._when_written[slot] = tell

    def _settle(self, slot: str, written: int) -> bool:
        """Nothing is awaited of a slot any more; give whether that holds for the call."""
        tell = self._when_written.pop(slot, None)
        if tell is not None:
            tell(written)
        self._promised.discard(slot)
        return self._look_if_done()

    # Values on their way to the keeper

    def _wants(self, slot: str) -> bool:
        """Whether the mode wants a slot to be kept."""
        return self._mode == "all" or (self._mode == "input") == slot.startswith(_OF_INPUTS)

    def _save(self, value: Any, kind: str, index: int) -> Any:
        slot = layout.slot_name(kind, index)
        if not isinstance(value, torch.Tensor):
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
        wanted = self._wants(slot)
        known = self._keeper.keep_again(self, slot, tensor) if wanted else None
        if known is not None:
            return {**known, "slot": slot}
        description = {"slot": slot, **describe(tensor)}
        if wanted:
            self._keeper.keep_tensor(self, slot, tensor, description)
        return description
