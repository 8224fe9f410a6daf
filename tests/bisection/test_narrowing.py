"""What is run next follows from what has been found."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchair_scope.bisection.narrowing import State, Suspect, after
from torchair_scope.bisection.plan import Finding


def finding(start: int, stop: int, verdict: str, graph: str = "g", operators: int = 100) -> Finding:
    return Finding(graph, "forward", 0, start, stop, operators, verdict, "")  # type: ignore[arg-type]


@given(
    operators=st.integers(1, 5000),
    faulty=st.integers(0, 4999),
    pieces=st.integers(2, 9),
)
def test_one_faulty_operator_is_found_in_logarithmically_many_runs(
    operators: int, faulty: int, pieces: int
) -> None:
    faulty %= operators
    state, runs = State(), 0
    while state.outcome is None:
        cuts = state.suspect.cuts(pieces) if state.suspect else ()
        inner = [cut for cut in cuts if 0 < cut < operators]
        bounds = [0, *inner, operators]
        state = after(
            state,
            [
                finding(start, stop, "differs" if start <= faulty < stop else "agrees")
                for start, stop in itertools.pairwise(bounds)
            ],
        )
        runs += 1
    assert state.outcome == "found"
    assert state.suspect == Suspect("g", faulty, faulty + 1)
    assert runs <= 1 + math.ceil(math.log(operators, pieces)) + 1


def test_the_first_piece_that_differs_is_the_next_suspect() -> None:
    found = [finding(0, 50, "agrees"), finding(50, 75, "differs"), finding(75, 100, "differs")]
    assert after(State(), found).suspect == Suspect("g", 50, 75)


def test_an_error_outside_of_the_suspect_does_not_lead_away_from_it() -> None:
    state = State(Suspect("g", 50, 60), finding(50, 60, "differs"))
    found = [finding(0, 50, "differs"), finding(50, 55, "agrees"), finding(55, 60, "differs")]
    assert after(state, found).suspect == Suspect("g", 55, 60)


def test_an_error_that_goes_away_when_it_is_cut_is_hidden() -> None:
    decisive = finding(50, 60, "differs")
    state = after(
        State(Suspect("g", 50, 60), decisive),
        [finding(50, 55, "agrees"), finding(55, 60, "agrees")],
    )
    assert (state.outcome, state.decisive) == ("hidden", decisive)


@pytest.mark.parametrize(
    ("verdicts", "outcome"),
    [(["agrees", "unknown"], "agrees"), (["unknown"], "unknown"), ([], "unknown")],
)
def test_a_first_run_without_an_error_is_the_end(verdicts: list[str], outcome: str) -> None:
    found = [finding(0, 100, verdict, graph=str(index)) for index, verdict in enumerate(verdicts)]
    assert after(State(), found).outcome == outcome
