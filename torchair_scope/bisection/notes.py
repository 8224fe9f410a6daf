"""What a user is told beside the result of a bisection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchair_scope.analysis.advice import listed, nearest
from torchair_scope.bisection.places import Places
from torchair_scope.bisection.plan import Finding

_MOST = 3


def notes_of(findings: Sequence[Finding]) -> Iterator[str]:
    """What the golden dump did not tell of each graph, given the findings of all runs."""
    for graph in dict.fromkeys(finding.graph for finding in findings):
        of_graph = [finding for finding in findings if finding.graph == graph]
        direction = of_graph[0].direction
        strayed = dict.fromkeys(name for finding in of_graph for name in finding.strayed)
        if strayed and direction != "backward":  # that begins with what a wrong forward has made
            yield (
                f"the {direction} graph begins with other values than the golden run: "
                f"{_some(strayed)}. What depends on them is judged by an eager run; give both "
                "runs the same inputs, weights and seed"
            )
        lacking = dict.fromkeys(name for finding in of_graph for name in finding.lacking)
        if lacking:
            yield (
                f"the golden dump lacks values of the {direction} graph: {_some(lacking)}. Pieces "
                "that these would tell about are judged by an eager run"
            )


def _some(names: Mapping[str, None]) -> str:
    shown = ", ".join(list(names)[:_MOST])
    return shown if len(names) <= _MOST else f"{shown} and {len(names) - _MOST} more"


def no_such_place(places: Places, graphs: Sequence[Mapping[str, Any]], steps: str) -> str:
    """Why nothing was judged where places were named."""
    having = {
        kind: list(dict.fromkeys(name for graph in graphs for name in graph[kind]))
        for kind in ("modules", "sources", "nodes")
    }
    if any(graph["judged"] for graph in graphs):
        return f"nothing was judged: what is in {places} did not run in the steps {steps}"
    there = [
        f"{kind}: {listed(_near(wanted, having[kind]))}"
        for kind, wanted in vars(places).items()
        if wanted and having[kind]
    ]
    return (
        f"nothing was judged: no operator of the {len(graphs)} compiled graphs is in {places}. "
        f"There are {'; '.join(there) or 'no operators with a known place'}"
    )


def _near(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    close = [name for one in wanted for name in nearest(one, names)]
    return list(dict.fromkeys(close)) or list(names)
