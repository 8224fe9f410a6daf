"""What one run of a program is told, and what it tells.

Both are files, since a run is a process of its own. The plan names for each graph where it is to
be cut; the findings have one line for each piece of each graph that ran, with a verdict.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchair_scope import switch
from torchair_scope.bisection.places import Places
from torchair_scope.numbers import Numbers, numbers

VARIABLE = f"{switch.VARIABLE}_BISECT"
Verdict = Literal["agrees", "differs", "unknown"]
JudgedBy = Literal["eager", "golden"]


@dataclass(frozen=True)
class Plan:
    """What a run is told.

    Args:
        findings: the file that it appends to.
        cuts: for a graph, by its key, the positions before which it is cut; what is before the
            first and after the last is not judged. Of one without an entry all `places` are.
        steps: which runs of each graph are judged.
        only: the key of the one graph that is judged; all graphs if None.
        places: what of each graph is judged.
        golden: path or URL of a golden dump.
        between_golden: whether to move the cuts to where all that flows has a golden value.
    """

    findings: str
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    steps: str = "0"
    only: str | None = None
    places: Places = field(default_factory=Places)
    golden: str | None = None
    between_golden: bool = False

    def write(self, path: Path) -> None:
        """Write it where the run will read it."""
        path.write_text(json.dumps(asdict(self)))

    def wants(self, key: str) -> bool:
        """Whether a graph is judged."""
        return self.only in (None, key)

    @functools.cached_property
    def selected(self) -> Numbers:
        """The steps as a set of numbers."""
        return numbers(self.steps, option="steps")


@dataclass(frozen=True)
class Finding:
    """What one piece of a graph has shown in one run of the graph.

    Args:
        graph: the key of the graph, the same in each run of the program.
        direction: "forward", "backward" or "inference".
        step: which run of that graph.
        start, stop: the operators of the piece, as positions in the graph.
        operators: of the whole graph.
        verdict: "differs" if the piece has made an error that its dtype does not explain,
            "agrees" if not, "unknown" if that cannot be told.
        reason: why, in words.
        error: the largest error against float64, or the golden dump, relative to the largest
            value; None if there is none to tell.
        here: the same for the run in eager mode.
        value: the name of the node whose value decides.
        nodes: of the piece: the name, target, module and source line of each.
        judged_by: "eager": compiled code is compared with a run of the same graph. "golden": with
            the golden dump.
        lacking: the values at its borders that the golden dump does not have.
        strayed: the inputs of the graph that are not those of the golden run.
    """

    graph: str
    direction: str
    step: int
    start: int
    stop: int
    operators: int
    verdict: Verdict
    reason: str
    error: float | None = None
    here: float | None = None
    value: str | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    judged_by: JudgedBy = "eager"
    lacking: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()


_writing = threading.Lock()


def tell(plan: Plan, finding: Finding) -> None:
    """Append a finding to the file of a plan."""
    _append(plan.findings, asdict(finding))


def tell_of_places(plan: Plan, told: Mapping[str, Any]) -> None:
    """Append what places there are in a graph, for the case that no graph has those of the plan."""
    _append(_graphs_beside(Path(plan.findings)), told)


def findings_in(path: Path) -> list[Finding]:
    """What a run has found so far; none if it has written nothing."""
    tuples = "nodes", "lacking", "strayed"
    return [
        Finding(**{**told, **{name: tuple(told.get(name, ())) for name in tuples}})
        for told in _lines_of(path)
    ]


def places_beside(findings: Path) -> list[dict[str, Any]]:
    """What places there are in each graph of a run."""
    return _lines_of(_graphs_beside(findings))


def _graphs_beside(findings: Path) -> Path:
    return findings.with_name("graphs.jsonl")


def _append(path: str | Path, told: Mapping[str, Any]) -> None:
    line = (json.dumps(told) + "\n").encode()
    with _writing:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    # A run that was killed may leave half a line.
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Which plan holds in this process

_here: Plan | None = None


@contextmanager
def following(plan: Plan) -> Iterator[None]:
    """Have a plan in force in this process."""
    global _here
    _here = plan
    try:
        yield
    finally:
        _here = None


def in_force() -> Plan | None:
    """The plan that graphs of this process are compiled by; None if nothing is being narrowed."""
    if _here is not None:
        return _here
    path = os.environ.get(VARIABLE)
    return _from_file(path) if path else None


@functools.lru_cache(maxsize=1)
def _from_file(path: str) -> Plan:
    told = json.loads(Path(path).read_text())
    cuts = {key: tuple(cuts) for key, cuts in told["cuts"].items()}
    return Plan(**{**told, "cuts": cuts, "places": Places.of_json(told["places"])})
