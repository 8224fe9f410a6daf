"""Compile a graph so that it can be judged a piece at a time, and judge it when it runs."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from torchair_scope.bisection.golden import GoldenGraph, golden_rank
from torchair_scope.bisection.judging import Piece
from torchair_scope.bisection.pieces import Pieces, cut_at, moved, operators_of
from torchair_scope.bisection.places import told_of
from torchair_scope.bisection.plan import Finding, Plan, in_force, tell, tell_of_places
from torchair_scope.capture import nodes
from torchair_scope.capture.compiler import Direction, Scoper
from torchair_scope.capture.cut import CutGraph, Part
from torchair_scope.capture.interpreter import StepSink, Unsaved
from torchair_scope.capture.parts import PieceCompiler, RegionCompiler
from torchair_scope.capture.symbols import bind_symbols
from torchair_scope.capture.tags import Tag

# So many nodes of a piece are listed in a finding.
_LISTED = 8


class Prober(Scoper):
    """Stands in for a `Scoper` while a fault is narrowed down: scopes are off, all is judged."""

    def wants(self, gm: fx.GraphModule) -> bool:
        """Every graph is judged."""
        return True

    def dumps_whole(self, gm: fx.GraphModule) -> bool:
        """Nothing is dumped."""
        return False

    def entered_with(self, gm: fx.GraphModule) -> Scoper:
        """Nothing in a graph without tags has to be kept."""
        return self

    def compile(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        direction: Direction,
        pieces: PieceCompiler,
    ) -> Any:
        """Compile one ATen graph as a whole, which also gives what flows between its pieces."""
        plan = in_force()
        digest, number = _recognised(gm)
        key = f"{direction}-{digest}-{number}"
        if plan is None or not plan.wants(key):
            return pieces.whole(gm, example_inputs)
        operators = operators_of(gm.graph)
        cuts = plan.cuts.get(key, ())
        judged = [(cuts[0], cuts[-1])] if cuts else plan.places.ranges(operators)
        if plan.places:
            tell_of_places(plan, {**told_of(operators), "judged": judged})
        if not judged:
            return pieces.whole(gm, example_inputs)
        golden = _golden(plan, operators, direction, number - 1)
        if golden is not None and plan.between_golden:
            step = plan.selected.first
            cuts = moved(cuts, operators, lambda node: golden.knows(node, step))
        bind_symbols(gm.graph)
        cut = cut_at(gm.graph, {*cuts, *itertools.chain(*judged)}, judged)
        compiled = RegionCompiler(gm, example_inputs, pieces).part(cut.whole)
        judge = _JudgedGraph(gm, plan, key, direction, cut, compiled, golden)
        part = Part(judge.run, compiled.inputs, compiled.outputs)
        return CutGraph(gm, [part], judge)


def _golden(
    plan: Plan, operators: Sequence[fx.Node], direction: Direction, twin: int
) -> GoldenGraph | None:
    if plan.golden is None:
        return None
    return GoldenGraph(golden_rank(plan.golden), operators, direction, twin)


_seen: Counter[str] = Counter()
_counting = threading.Lock()


def forget_graphs() -> None:
    """Count graphs anew: a program is about to run again in this process."""
    _seen.clear()


def _recognised(gm: fx.GraphModule) -> tuple[str, int]:
    """What a graph is recognised by when the program runs again, and how many were like it."""
    text = ";".join(f"{node.name}={node.op}:{node.target}" for node in gm.graph.nodes)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    with _counting:
        _seen[digest] += 1
        return digest, _seen[digest]


class _Run:
    """One run of a judged graph; there is nothing to save."""

    def __init__(self, number: int) -> None:
        self.number = number

    def begin_call(self, *call: Any) -> Unsaved:
        """Save nothing."""
        return Unsaved()

    def saves(self, tag: Tag | None) -> bool:
        """No scope's."""
        return False

    def finish(self) -> None:
        """Save nothing."""


class _JudgedGraph:
    """A compiled graph that judges its pieces each time that it runs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: Plan,
        key: str,
        direction: Direction,
        cut: Pieces,
        compiled: Part,
        golden: GoldenGraph | None,
    ) -> None:
        self._plan = plan
        self._key = key
        self._direction = direction
        self._cut = cut
        self._compiled = compiled
        self._golden = golden
        self._pieces = {
            stage: Piece(gm, region, cut.copies) for stage, region in cut.regions.items()
        }
        self._runs = itertools.count()

    def begin_step(self, *, announced: bool = False) -> StepSink:
        """Begin a run of the graph."""
        return _Run(next(self._runs))

    def run(self, args: list[Any], step: StepSink) -> Sequence[Any]:
        """Run the compiled graph, then judge its pieces by what has flowed between them."""
        compiled = self._compiled
        if not isinstance(step, _Run) or step.number not in self._plan.selected:
            return compiled.run(args, step)
        given = zip(compiled.inputs, args, strict=True)
        values = {node: self._kept(node, value) for node, value in given}
        outputs = compiled.run(args, step)
        values.update(zip(compiled.outputs, outputs, strict=True))
        for stage in sorted(self._pieces):
            tell(self._plan, self._finding(stage, step.number, values))
        return outputs

    def _kept(self, node: fx.Node, value: Any) -> Any:
        """An input as it is before the graph has run."""
        return value.clone() if node in self._cut.written else value

    def _finding(self, stage: int, step: int, values: Mapping[fx.Node, Any]) -> Finding:
        operators = self._cut.operators
        start, stop = self._cut.bounds[stage : stage + 2]
        judged = self._pieces[stage].judged(values, self._golden, step)
        return Finding(
            graph=self._key,
            direction=self._direction,
            step=step,
            start=start,
            stop=stop,
            operators=len(operators),
            nodes=_listed(operators[start:stop]),
            **vars(judged),
        )


def _listed(operators: Sequence[fx.Node]) -> tuple[Mapping[str, Any], ...]:
    """The operators of a piece, or the first and the last of many."""
    shown = operators if len(operators) <= _LISTED else (operators[0], operators[-1])
    return tuple(_described(node) for node in shown)


def _described(node: fx.Node) -> dict[str, Any]:
    source = nodes.source_of(node)
    return {
        "name": node.name,
        "target": nodes.target_name(node),
        "module": nodes.module_of(node),
        "source": source._asdict() if source else None,
    }
