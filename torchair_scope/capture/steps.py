"""The steps of a compiled graph on their way to the store: which are dumped, and where to.

Each scope in the graph may have options of its own, so one run of a graph may be a step of several
dumps, or of none.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.interpreter import CallSink, StepSink, Unsaved
from torchair_scope.capture.saved import Saved, SavedCall
from torchair_scope.capture.settings import DumpSettings, selects_this_rank
from torchair_scope.capture.tags import Tag
from torchair_scope.options import Options
from torchair_scope.store.choice import Choice
from torchair_scope.store.files import Pace
from torchair_scope.store.run import open_run
from torchair_scope.store.trigger import Condition, HeldStep, trigger_of
from torchair_scope.store.writer import GraphDump, Mode, Step

Destination = tuple[Any, Any]


class GraphSink(Protocol):
    """A graph, as the store sees it: it begins a step for each run."""

    def begin_step(self, *, announced: bool = False) -> StepSink:
        """Begin to save one run of the graph.

        Args:
            announced: whether the run announces all that it writes to, by `identity.writing`.
        """


class DumpedGraph:
    """One compiled graph; its record is written at the first run that is dumped.

    A wrong path is found there and not while Dynamo compiles, so that the user gets the
    NotADirectoryError or PermissionError itself, and before any work is done.

    Args:
        settings: those of the backend.
        number: of the graph.
        describe: gives the graph's record, when it is to be written.
        saved: what is saved of it.
    """

    def __init__(
        self,
        settings: DumpSettings,
        number: int,
        describe: Callable[[], dict[str, Any]],
        saved: Saved,
    ) -> None:
        self._settings = settings
        self._number = number
        self._describe = functools.cache(describe)
        self._lock = threading.Lock()
        self._steps = itertools.count()
        self._dumps: dict[Destination, GraphDump] = {}
        self._numbers: dict[Tag | None, list[str | None]] = defaultdict(list)
        for call in saved.all_calls():
            self._numbers[call.tag].append(call.number)
        self._noted: set[tuple[Tag | None, Outcome]] = set()

    def begin_step(self, *, announced: bool = False) -> StepSink:
        """Begin to save one run of the graph; nothing is written if none of it is selected."""
        number = next(self._steps)
        selected = self._selected(number)
        together: dict[_Place, list[Options]] = defaultdict(list)
        for tag, options in selected.items():
            together[_Place.of(tag, options)].append(options)
        steps = {
            place: place.begin_step(
                self._dump(place.destination), number, pace_of(options, announced)
            )
            for place, options in together.items()
        }
        asked = {
            tag: Asked(steps[_Place.of(tag, options)], options.mode or "all", Choice.of(options))
            for tag, options in selected.items()
        }
        return DumpedStep(list(steps.values()), asked) if asked else Unsaved()

    def _selected(self, step: int) -> dict[Tag | None, Options]:
        """The scopes that are dumped in a step, with their options."""
        selected: dict[Tag | None, Options] = {}
        for tag in self._numbers:
            options = self._settings.options_of(tag)
            skipped = why_skipped(options, step)
            if skipped is None:
                selected[tag] = options
            else:
                self._note(tag, skipped)
        return selected

    def _dump(self, destination: Destination) -> GraphDump:
        with self._lock:
            if destination not in self._dumps:
                run = open_run(*destination)
                self._dumps[destination] = run.graph(self._number, self._describe())
            return self._dumps[destination]

    def _note(self, tag: Tag | None, outcome: Outcome) -> None:
        """Tell the account once what it would be told at each step."""
        if (tag, outcome) not in self._noted:
            self._noted.add((tag, outcome))
            account.note(self._numbers[tag], outcome)


def why_skipped(options: Options, step: int | None) -> Outcome | None:
    """What the account says of a step that is not dumped; None for one that is.

    Args:
        options: those in force.
        step: its number; None if it is selected in any case.
    """
    if not selects_this_rank(options):
        return Outcome.RANK
    return None if step is None or options.selects(step) else Outcome.STEP


def pace_of(options: Iterable[Options], announced: bool = False) -> Pace:
    """How a step is written that is dumped for scopes with these options: by the strictest."""
    given = list(options)
    built_in = Pace()
    return Pace(
        announced,
        lag=min(o.lag if o.lag is not None else built_in.lag for o in given),
        max_inflight=min(o.max_inflight or built_in.max_inflight for o in given),
    )


class Asked(NamedTuple):
    """What a scope asks for in one step."""

    step: Step | HeldStep
    mode: Mode
    choice: Choice


class _Place(NamedTuple):
    """What the scopes have in common that are saved as one step."""

    destination: Destination
    scope: str | None
    condition: Condition | None

    @classmethod
    def of(cls, tag: Tag | None, options: Options) -> _Place:
        """The place of a scope: with a trigger, an outermost one has steps of its own."""
        condition = condition_of(options)
        scope = outermost(tag) if condition is not None else None
        return cls((options.path, options.on_error), scope, condition)

    def begin_step(self, dump: GraphDump, number: int, pace: Pace) -> Step | HeldStep:
        """Begin a step of a dump there."""
        return begin_step(dump, number, pace, self.scope, self.destination, self.condition)


def begin_step(
    dump: GraphDump,
    number: int,
    pace: Pace,
    scope: str | None,
    destination: Destination,
    condition: Condition | None,
) -> Step | HeldStep:
    """Begin a step that is written, or one that is held until its trigger decides."""
    if condition is None:
        return dump.begin_step(number, pace)
    return trigger_of(scope or "", destination, condition).begin_step(dump, number, pace)


def condition_of(options: Options) -> Condition | None:
    """When a step is saved; None if it always is."""
    if options.when is None:
        return None
    return Condition(options.when, options.keep_last or 0, options.max_held or 0)


def outermost(tag: Tag | None) -> str:
    """The scope that a scope lies in."""
    return tag.scope.partition("/")[0] if tag is not None else ""


class DumpedStep:
    """One run of a compiled graph: a step of each dump that one of its scopes goes to."""

    def __init__(self, steps: Sequence[Step | HeldStep], asked: Mapping[Tag | None, Asked]) -> None:
        self._steps = steps
        self._asked = asked
        self._orders = itertools.count()

    def begin_call(
        self,
        node: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        saved: SavedCall,
    ) -> CallSink:
        """Save the inputs of a call, if its scope is dumped in this step."""
        if saved.tag not in self._asked:
            return Unsaved()
        step, mode, choice = self._asked[saved.tag]
        report = account.begun(saved.tag, saved.number)
        facts, order = saved.facts, next(self._orders)
        return step.begin_call(node, target, args, kwargs, facts, mode, report, choice, order)

    def saves(self, tag: Tag | None) -> bool:
        """Whether calls of a scope are saved in this step."""
        return tag in self._asked

    def finish(self) -> None:
        """Write the steps' records."""
        for step in self._steps:
            step.finish()
