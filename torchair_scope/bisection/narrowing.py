"""From what runs have found to what the next one is told: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchair_scope.bisection.plan import Finding

Outcome = Literal["found", "agrees", "hidden", "unknown"]


@dataclass(frozen=True)
class Suspect:
    """A piece of a graph that has made an error.

    Args:
        graph: the key of the graph.
        start, stop: the operators of the piece.
    """

    graph: str
    start: int
    stop: int

    def cuts(self, pieces: int) -> tuple[int, ...]:
        """Where it is cut next: around it, and inside into pieces of about equal length."""
        length = self.stop - self.start
        pieces = min(pieces, length)
        return tuple(self.start + length * index // pieces for index in range(pieces + 1))


@dataclass(frozen=True)
class State:
    """What is known after some runs.

    Args:
        suspect: what made the error, as narrow as it is known; None before the first run.
        decisive: the finding that says so.
        outcome: how it ended; None if another run is needed.
    """

    suspect: Suspect | None = None
    decisive: Finding | None = None
    outcome: Outcome | None = None


def after(state: State, findings: Sequence[Finding]) -> State:
    """The state after one more run.

        state = State()
        while state.outcome is None:
            state = after(state, run(state.suspect))

    The first piece that differs is the next suspect. If none does although their union did, the
    cuts themselves have changed what the compiler makes of it, and it cannot be narrowed further.
    Nor can what could not be cut, since the golden dump has no values inside.

    Args:
        state: before the run.
        findings: those of the run, in the order in which they were made.
    """
    inside = [finding for finding in findings if _is_inside(finding, state.suspect)]
    wrong = next((finding for finding in inside if finding.verdict == "differs"), None)
    if wrong is not None:
        suspect = Suspect(wrong.graph, wrong.start, wrong.stop)
        if wrong.stop - wrong.start <= 1:
            return State(suspect, wrong, "found")
        return State(suspect, wrong, "hidden" if suspect == state.suspect else None)
    if state.suspect is not None:
        return State(state.suspect, state.decisive, "hidden" if inside else "unknown")
    agree = any(finding.verdict == "agrees" for finding in inside)
    return State(None, None, "agrees" if agree else "unknown")


def _is_inside(finding: Finding, suspect: Suspect | None) -> bool:
    if suspect is None:
        return True
    same = finding.graph == suspect.graph
    return same and suspect.start <= finding.start and finding.stop <= suspect.stop
