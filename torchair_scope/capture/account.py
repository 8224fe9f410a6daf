"""The account: what became of every operator of every scope, and why what is missing is missing.

The unit is an operator that a scope was around when it was traced, a *tagged* node of the Dynamo
graph, or that ran in it in eager code. Each has exactly one `Outcome`, so tagged = dumped + the
reasons. What AOTAutograd makes of a node (a forward operator, two backward ones) carries the
node's number among its annotations, and the best outcome of these is the node's.
"""

from __future__ import annotations

import enum
import itertools
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair_scope.capture.dynamo_graph import (
    computes_tensors,
    dead_nodes,
    equal_operators,
    gives_what_it_is_given,
    is_constant,
)
from torchair_scope.capture.nodes import is_of_backward
from torchair_scope.capture.partition import has_own_kind
from torchair_scope.capture.tags import (
    UNKNOWN,
    Tag,
    annotate_node,
    graphs_in,
    own_annotations,
    tag_of,
)
from torchair_scope.capture.targets import is_unpacking
from torchair_scope.store.budget import BUDGET, DISK
from torchair_scope.store.writer import CallReport

KEY_OF_NODE = "torchair_scope_node"
KEY_OF_EQUALS = "torchair_scope_equals"  # on operators that are equal to one of a scope
# What is dumped without a scope has a row as well.
WHOLE_GRAPHS = Tag("(whole graphs)", "debug.data_dump.type")
NAMED_NODES = Tag("(named nodes)", "dump_config.dump_layer")


class Outcome(enum.IntEnum):
    """What became of an operator of a scope. Of several, the last one in this list counts."""

    DEAD = enum.auto()
    FOLDED = enum.auto()
    NO_OP = enum.auto()
    REMOVED = enum.auto()
    MERGED = enum.auto()
    NO_TENSOR = enum.auto()
    UNPACKS = enum.auto()
    IN_BODY = enum.auto()
    FILTER = enum.auto()
    OPS = enum.auto()
    NOT_RUN = enum.auto()
    INSIDE = enum.auto()
    NOT_TAPPED = enum.auto()
    RANK = enum.auto()
    STEP = enum.auto()
    NOT_WRITTEN = enum.auto()
    NOT_TRIGGERED = enum.auto()
    RAISED = enum.auto()
    DTYPE = enum.auto()
    DISK = enum.auto()
    BUDGET = enum.auto()
    DUMPED = enum.auto()

    @property
    def reason(self) -> str:
        """The outcome in the words of the account."""
        return _REASONS[self]


_REASONS = {
    Outcome.DEAD: "removed as dead code, since nothing uses its value",
    Outcome.FOLDED: "folded to a constant",
    Outcome.NO_OP: "does nothing, since it gives what it is given",
    Outcome.REMOVED: "removed or replaced by a pass: no operator of the compiled graph is its own",
    Outcome.MERGED: "merged with an equal operator (CSE)",
    Outcome.NO_TENSOR: "not a tensor: computes sizes or other numbers",
    Outcome.UNPACKS: "takes a value out of a result that is dumped as a whole",
    Outcome.IN_BODY: "in the body of an operator that is dumped as one",
    Outcome.FILTER: "left out by the filter",
    Outcome.OPS: "not selected by ops",
    Outcome.INSIDE: "inside its scope: tap='boundary' takes what crosses its border",
    Outcome.NOT_TAPPED: "not handed out by the compiled code",
    Outcome.NOT_RUN: "did not run",
    Outcome.RANK: "rank not selected",
    Outcome.STEP: "step not selected",
    Outcome.RAISED: "raised an exception",
    Outcome.NOT_WRITTEN: "write error",
    Outcome.NOT_TRIGGERED: "not triggered: `when` asked for no step of it",
    Outcome.DISK: "disk: only statistics are saved, to leave min_free",
    Outcome.BUDGET: "budget: only statistics are saved",
    Outcome.DTYPE: "none of its tensors can be saved",
    Outcome.DUMPED: "dumped",
}
# What the user has not chosen, and would want to know of.
_LOSSES = {
    Outcome.DEAD,
    Outcome.IN_BODY,
    Outcome.NOT_TAPPED,
    Outcome.RAISED,
    Outcome.NOT_WRITTEN,
    Outcome.DTYPE,
    Outcome.DISK,
    Outcome.BUDGET,
}


@dataclass
class Entry:
    """What is known of one scope: a name, and the place where it was opened."""

    scope: str
    opened_at: str
    tagged: int = 0
    reached: int = 0
    calls: int = 0
    tensors: int = 0
    bytes: int = 0
    statistics: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    missing_tensors: Counter[str] = field(default_factory=Counter)
    uncompiled: str | None = None
    unseen: str | None = None
    is_remarked_on: bool = False
    folders: set[str] = field(default_factory=set)
    # Whether all that is traced in it so far is known to have come to a backend of this package.
    arrived: bool = True
    # Names of nodes that were asked for, and whether a graph has had one.
    names: dict[str, bool] = field(default_factory=dict)


class Operator:
    """One tagged operator, and the best that has become of it so far."""

    def __init__(self, entry: Entry, outcome: Outcome) -> None:
        self.entry = entry
        self.outcome = outcome
        entry.outcomes[outcome] += 1

    def becomes(self, outcome: Outcome) -> None:
        """Take note of an outcome."""
        if outcome > self.outcome:
            self.entry.outcomes[self.outcome] -= 1
            self.entry.outcomes[outcome] += 1
            self.outcome = outcome


class _Traced(threading.local):
    """The scopes that were traced on this thread since the last graph."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []


class Account:
    """The scopes of this process. Any thread may write to it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._operators: dict[str, Operator] = {}
        self._equals: dict[str, list[str]] = {}
        self._numbers = itertools.count()
        self._thread = _Traced()

    def forget(self) -> None:
        """Begin anew: no scope was entered."""
        with self._lock:
            self._entries.clear()
            self._operators.clear()
            self._equals.clear()

    def entries(self) -> list[Entry]:
        """All scopes, in the order in which they were first entered."""
        with self._lock:
            return list(self._entries.values())

    def opened(self, tag: Tag) -> None:
        """A scope is entered in eager code."""
        with self._lock:
            self._entry(tag)

    def opened_in_trace(self, tag: Tag) -> None:
        """A scope is entered in code that is traced."""
        with self._lock:
            entry = self._entry(tag)
            entry.arrived = entry.arrived and bool(entry.tagged)
        self._thread.entries.append(entry)

    def uncompiled(self, tag: Tag, reason: str) -> None:
        """A scope is reached without a compiler, although it lies in compiled code."""
        with self._lock:
            self._entry(tag).uncompiled = reason

    def unseen(self, tag: Tag, what: str) -> None:
        """Operators that belong to a scope, and of which nothing can be seen; the user was told."""
        with self._lock:
            entry = self._entry(tag)
            entry.unseen, entry.is_remarked_on = what, True

    def _entry(self, tag: Tag) -> Entry:
        if tag.opened_at == UNKNOWN:  # a sum of gradients, whose scope is known by name only
            for entry in self._entries.values():
                if entry.scope == tag.scope:
                    return entry
        key = (tag.scope, tag.opened_at)
        if key not in self._entries:
            self._entries[key] = Entry(*key)
        return self._entries[key]

    # Graphs

    def arrived(self) -> None:
        """A graph that was traced on this thread has come to a backend of this package."""
        while self._thread.entries:
            self._thread.entries.pop().arrived = True

    def traced(self, gm: torch.fx.GraphModule) -> None:
        """Count the tagged nodes of a Dynamo graph, and number them for `reached`."""
        self.arrived()
        dead = set(dead_nodes(gm))
        for graph in graphs_in(gm):
            for node in graph.nodes:
                tag = tag_of(node)
                if tag is not None and node.op.startswith("call_"):
                    self._number(node, tag, _outcome_when_traced(node, dead))
            for equals in equal_operators(graph):
                self._join(equals)

    def _join(self, equals: list[torch.fx.Node]) -> None:
        """Mark operators, so that of one of a scope which is missing an equal one can be found."""
        numbers = [number for number in map(number_of, equals) if number is not None]
        if numbers:
            with self._lock:
                self._equals[numbers[0]] = numbers
            for node in equals:
                annotate_node(node, KEY_OF_EQUALS, numbers[0])

    def _number(self, node: torch.fx.Node, tag: Tag, outcome: Outcome) -> None:
        with self._lock:
            number = str(next(self._numbers))
            entry = self._entry(tag)
            entry.tagged += 1
            self._operators[number] = Operator(entry, outcome)
        annotate_node(node, KEY_OF_NODE, number)

    def reached(self, gm: torch.fx.GraphModule, *, is_traced: bool) -> None:
        """Count the tagged nodes of an ATen graph; tag those of one that Dynamo's did not come by.

        Args:
            gm: the graph.
            is_traced: whether `traced` was told of the graph that it comes of.
        """
        self.arrived()
        for graph in graphs_in(gm):
            for node in graph.nodes:
                tag = tag_of(node)
                if not node.op.startswith("call_"):
                    continue
                if not is_of_backward(node):
                    self._note_merged(node)
                if tag is None:
                    continue
                if not is_traced:
                    self._number(node, tag, Outcome.REMOVED)
                with self._lock:
                    self._entry(tag).reached += 1
                self.note([number_of(node)], _outcome_when_reached(node))

    def _note_merged(self, node: torch.fx.Node) -> None:
        """An operator is in the compiled graph: what is equal to it and is not was merged."""
        group = own_annotations(node.meta.get("custom")).get(KEY_OF_EQUALS)
        self.note(self._equals.get(group or "", ()), Outcome.MERGED)

    def untagged(self, gm: torch.fx.GraphModule) -> None:
        """Count the operators of an ATen graph that is dumped as a whole."""
        for graph in graphs_in(gm):
            for node in graph.nodes:
                if node.op.startswith("call_"):
                    self._reached_untagged(node, WHOLE_GRAPHS)

    def named(self, gm: torch.fx.GraphModule, names: Iterable[str]) -> None:
        """Count the nodes of an ATen graph that are dumped for their names."""
        with self._lock:
            found = self._entry(NAMED_NODES).names
            found.update((name, False) for name in names if name not in found)
        for graph in graphs_in(gm):
            for node in graph.nodes:
                if node.name in names:
                    found[node.name] = True
                    if tag_of(node) is None:
                        self._reached_untagged(node, NAMED_NODES)

    def _reached_untagged(self, node: torch.fx.Node, stands_for: Tag) -> None:
        self._number(node, stands_for, _outcome_when_reached(node))
        with self._lock:
            self._entry(stands_for).reached += 1

    def note(self, numbers: Iterable[str | None], outcome: Outcome) -> None:
        """Take note of what becomes of some numbered nodes."""
        with self._lock:
            for number in numbers:
                if number in self._operators:
                    self._operators[number].becomes(outcome)

    # Calls

    def begun(self, tag: Tag | None, number: str | None) -> Callable[[CallReport], None] | None:
        """A call of a compiled graph begins; gives what is told what was written of it."""
        with self._lock:
            tagged = self._operators.get(number or "")
            if tagged is not None:
                tagged.becomes(Outcome.NOT_WRITTEN)
            if tag is not None:
                entry = self._entry(tag)
            elif tagged is not None:
                entry = tagged.entry
            else:
                return None
        return lambda report: self._record(entry, tagged, report)

    def ran(self, tag: Tag, outcome: Outcome) -> None:
        """An operator ran in eager code in a scope, and is not dumped."""
        with self._lock:
            self._ran(tag, outcome)

    def begun_eagerly(self, tag: Tag) -> Callable[[CallReport], None]:
        """A call of eager code begins; gives what is told what was written of it."""
        with self._lock:
            tagged = self._ran(tag, Outcome.NOT_WRITTEN)
        return lambda report: self._record(tagged.entry, tagged, report)

    def _ran(self, tag: Tag, outcome: Outcome) -> Operator:
        entry = self._entry(tag)
        entry.tagged += 1
        entry.reached += 1
        return Operator(entry, outcome)

    def _record(self, entry: Entry, tagged: Operator | None, report: CallReport) -> None:
        with self._lock:
            if not report.is_triggered:
                if tagged is not None:
                    tagged.becomes(Outcome.NOT_TRIGGERED)
                return
            entry.folders.add(report.folder)
            entry.missing_tensors.update(lost["reason"] for lost in report.missing)
            if tagged is not None:
                tagged.becomes(_outcome_of(report))
            if not report.finished:
                return
            entry.calls += 1
            entry.tensors += report.tensors
            entry.bytes += report.bytes
            entry.statistics += report.statistics


def _outcome_when_traced(node: torch.fx.Node, dead: set[torch.fx.Node]) -> Outcome:
    if node in dead:
        return Outcome.DEAD
    if _takes_apart(node):
        return Outcome.UNPACKS
    if not computes_tensors(node):
        return Outcome.NO_TENSOR
    if gives_what_it_is_given(node):
        return Outcome.NO_OP
    return Outcome.FOLDED if is_constant(node) else Outcome.REMOVED


def _takes_apart(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph takes a value out of a tuple, and is no operator."""
    if node.target is not operator.getitem or not isinstance(node.args[0], torch.fx.Node):
        return False
    return not isinstance(node.args[0].meta.get("example_value"), torch.Tensor)


def _outcome_when_reached(node: torch.fx.Node) -> Outcome:
    """What is to be said of a node, unless its graph's `Selection` knows better."""
    if has_own_kind(node):
        return Outcome.IN_BODY
    return Outcome.UNPACKS if is_unpacking(node) else Outcome.NO_TENSOR


def _outcome_of(report: CallReport) -> Outcome:
    if not report.finished:
        return Outcome.RAISED
    if report.tensors or not report.missing:
        return Outcome.DUMPED
    reasons = {lost["reason"].partition(":")[0] for lost in report.missing}
    for kind, outcome in ((BUDGET, Outcome.BUDGET), (DISK, Outcome.DISK)):
        if kind in reasons:
            return outcome
    # A file that could not be written has a name, a tensor that could not be read has none.
    lost_files = any(lost["file"] is not None for lost in report.missing)
    return Outcome.NOT_WRITTEN if lost_files else Outcome.DTYPE


def number_of(node: torch.fx.Node) -> str | None:
    """The number of the tagged Dynamo node that a node comes of."""
    return own_annotations(node.meta.get("custom")).get(KEY_OF_NODE)


account = Account()


def _unlock() -> None:
    """A forked child's copy of the lock may be held by no one."""
    account._lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


# What a user is shown


@dataclass(frozen=True)
class Row:
    """One scope's line of the account.

    Attributes:
        scope: its name, with those of the scopes around it: `outer/inner`.
        opened_at: file and line of where it was opened.
        tagged: operators that Dynamo traced in it, or that ran in it in eager code.
        reached: operators of it in the ATen graphs that reached the compiler.
        dumped: how many of the tagged ones are dumped.
        calls: calls dumped, of all steps, forward and backward.
        tensors: tensors in their files.
        bytes: size of all their files.
        statistics: rows of statistics.
        missing: for each reason how many of the tagged operators are not dumped.
        missing_tensors: for each reason how many tensors of dumped calls are not saved.
        uncompiled: why it ran uncompiled although it lies in compiled code, else None.
        remark: what the user should know of the scope as a whole; None if all is well.
    """

    scope: str
    opened_at: str
    tagged: int
    reached: int
    dumped: int
    calls: int
    tensors: int
    bytes: int
    statistics: int
    missing: Mapping[str, int]
    missing_tensors: Mapping[str, int]
    uncompiled: str | None
    remark: str | None


@dataclass(frozen=True)
class Summary:
    """What became of each scope that was entered in this process; as text it is a table.

    Attributes:
        rows: a scope each.
        remarks: on dump folders, such as that their file system has no hard links.
    """

    rows: list[Row]
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self._table(), *self.remarks])

    def _table(self) -> str:
        if not self.rows:
            return "no scope was entered"
        titles = ("scope", "opened at", "tagged", "compiled", "dumped", "calls", "tensors", "bytes")
        cells = [titles, *map(_cells, self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
        lines = [_line(row, widths) for row in cells]
        for position, row in reversed(list(enumerate(self.rows, start=1))):
            lines[position + 1 : position + 1] = [f"    {text}" for text in _explained(row)]
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (row.tagged, row.reached, row.dumped, row.calls, row.tensors, row.bytes)
    return (row.scope, row.opened_at, *map(str, numbers))


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _explained(row: Row) -> Iterator[str]:
    if row.remark is not None:
        yield row.remark
    if row.uncompiled is not None:
        yield f"ran uncompiled: {row.uncompiled}"
    for reason, count in row.missing.items():
        yield f"{count} not dumped: {reason}"
    for reason, count in row.missing_tensors.items():
        yield f"{count} tensors not saved: {reason}"


def summary() -> Summary:
    """The account as it stands now."""
    entries = account.entries()
    return Summary([_row(entry, entries) for entry in entries])


def _row(entry: Entry, entries: list[Entry]) -> Row:
    outcomes = {outcome: count for outcome, count in sorted(entry.outcomes.items()) if count}
    dumped = outcomes.pop(Outcome.DUMPED, 0)
    return Row(
        scope=entry.scope,
        opened_at=entry.opened_at,
        tagged=entry.tagged,
        reached=entry.reached,
        dumped=dumped,
        calls=entry.calls,
        tensors=entry.tensors,
        bytes=entry.bytes,
        statistics=entry.statistics,
        missing={outcome.reason: count for outcome, count in outcomes.items()},
        missing_tensors=dict(entry.missing_tensors),
        uncompiled=entry.uncompiled,
        remark=_remark(entry, entries),
    )


def _remark(entry: Entry, entries: list[Entry]) -> str | None:
    """What is wrong with a scope as a whole."""
    inside = any(other.tagged and other.scope.startswith(f"{entry.scope}/") for other in entries)
    inside = inside or bool(entry.names)
    if not entry.tagged and any(_is_within(other, entry) for other in entries if other.tagged):
        return None
    if not entry.tagged and not inside and not entry.arrived:
        return (
            "nothing of it came to a backend of torchair_scope: it is empty, or its code is "
            "compiled with another backend"
        )
    if not entry.tagged and not inside:
        return (
            "empty: there is no operator in it. Put it around the code that computes the tensors "
            "to be dumped"
        )
    if entry.tagged and not entry.calls:
        reasons = sorted(outcome.reason for outcome, count in entry.outcomes.items() if count)
        return f"nothing of it is saved: {'; '.join(reasons)}"
    unknown = [repr(name) for name, is_known in sorted(entry.names.items()) if not is_known]
    if unknown:
        return (
            f"no graph has a node named {', '.join(unknown)}. "
            "config.debug.graph_dump.type = 'py' writes graphs with the names of their nodes"
        )
    return entry.unseen


def _is_within(other: Entry, entry: Entry) -> bool:
    """Whether an entry is that of the same scope, as it ran in another one that it was traced in.

    What is traced for eager code, as branches of `cond` are, does not know the scopes around it.
    """
    return other.opened_at == entry.opened_at and other.scope.endswith(f"/{entry.scope}")


def has_losses(entry: Entry, entries: list[Entry]) -> bool:
    """Whether something is missing that the user has not chosen to leave out."""
    lost = any(entry.outcomes[outcome] for outcome in _LOSSES)
    chosen = {
        Outcome.STEP,
        Outcome.RANK,
        Outcome.OPS,
        Outcome.FILTER,
        Outcome.NOT_TRIGGERED,
    }
    left_out = any(entry.outcomes[outcome] for outcome in chosen)
    nothing = _remark(entry, entries) is not None and not left_out
    return lost or nothing or bool(entry.missing_tensors)


def as_record(row: Row) -> dict[str, Any]:
    """A row as a record of a manifest."""
    return {"record": "account", **row.__dict__}
