"""Compile a graph so that it can be judged a piece at a time, and judge it when it runs."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.rerun import Finding as Judgement
from torchair_scope.analysis.rerun import Rerun, Result, judge
from torchair_scope.bisection.again import RegionRun
from torchair_scope.bisection.pieces import Pieces, cut_at
from torchair_scope.bisection.plan import Finding, Plan, Verdict, in_force, tell
from torchair_scope.capture import nodes
from torchair_scope.capture.compiler import Direction, Scoper
from torchair_scope.capture.cut import CutGraph, Part
from torchair_scope.capture.extract import extract
from torchair_scope.capture.interpreter import StepSink, Unsaved
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import PieceCompiler, RegionCompiler
from torchair_scope.capture.symbols import bind_symbols
from torchair_scope.capture.tags import Tag
from torchair_scope.store.arrays import UnsavableTensorError, to_numpy

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
        plan, key = in_force(), _key(gm, direction)
        if plan is None or not plan.wants(key):
            return pieces.whole(gm, example_inputs)
        bind_symbols(gm.graph)
        cut = cut_at(gm.graph, plan.cuts.get(key, ()))
        compiled = RegionCompiler(gm, example_inputs, pieces).part(cut.whole)
        judged = _JudgedGraph(gm, plan, key, direction, cut, compiled)
        part = Part(judged.run, compiled.inputs, compiled.outputs)
        return CutGraph(gm, [part], judged)


_seen: Counter[str] = Counter()
_counting = threading.Lock()


def forget_graphs() -> None:
    """Count graphs anew: a program is about to run again in this process."""
    _seen.clear()


def _key(gm: fx.GraphModule, direction: Direction) -> str:
    """What a graph can be recognised by when the program runs again."""
    text = ";".join(f"{node.name}={node.op}:{node.target}" for node in gm.graph.nodes)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    with _counting:
        _seen[digest] += 1
        return f"{direction}-{digest}-{_seen[digest]}"


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
    ) -> None:
        self._plan = plan
        self._key = key
        self._direction = direction
        self._cut = cut
        self._compiled = compiled
        self._pieces = {
            stage: _Piece(gm, region, cut.copies) for stage, region in cut.regions.items()
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
        piece, operators = self._pieces[stage], self._cut.operators
        judgement = piece.judgement(values)
        start, stop = self._cut.bounds[stage : stage + 2]
        dumped, rerun = judgement.dumped, judgement.rerun
        return Finding(
            graph=self._key,
            direction=self._direction,
            step=step,
            start=start,
            stop=stop,
            operators=len(operators),
            verdict=_verdict(judgement),
            reason=judgement.reason,
            error=dumped.max_relative if dumped else None,
            here=rerun.max_relative if rerun else None,
            value=judgement.slot and piece.value_in(judgement.slot),
            nodes=_listed(operators[start:stop]),
        )


def _verdict(judgement: Judgement) -> Verdict:
    if judgement.verdict == "bug":
        return "differs"
    # Many operators can take each other far from the reference; that a run here is as far says
    # that this is no fault of the compiled code.
    as_far = judgement.dumped is not None and judgement.rerun is not None
    return "agrees" if judgement.verdict == "rounding" or as_far else "unknown"


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


class _Piece:
    """A piece of a graph, and how it is judged."""

    def __init__(
        self, gm: fx.GraphModule, region: Region, copies: Mapping[fx.Node, fx.Node]
    ) -> None:
        piece = extract(gm, region)
        self._inputs = [copies.get(node, node) for node in piece.inputs]
        self._outputs = piece.outputs
        self._run = RegionRun(piece.module)

    def judgement(self, values: Mapping[fx.Node, Any]) -> Judgement:
        """Judge what the compiled code has made of this piece, given all that has flowed."""
        given = tuple(values[node] for node in self._inputs)
        run = Rerun(self._run, (given, {}), "")
        try:
            return judge(dict(self._results(values)), run, torch.float64)
        except (NotReplayableError, UnsavableTensorError) as error:
            return Judgement("cannot", str(error))

    def _results(self, values: Mapping[fx.Node, Any]) -> Iterator[tuple[str, Result]]:
        for index, node in enumerate(self._outputs):
            value = values[node]
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                yield f"OUTPUT.{index}", Result(dtype, tuple(value.shape), to_numpy(value))

    def value_in(self, slot: str) -> str:
        """The node whose value a slot of a judgement is."""
        return self._outputs[int(slot.rpartition(".")[2])].name
