"""Whether a piece of a graph has made an error: by the golden dump, and by running it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.rerun import Finding as Judgement
from torchair_scope.analysis.rerun import Rerun, Result, judge
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.bisection.again import RegionRun
from torchair_scope.bisection.golden import GoldenGraph
from torchair_scope.bisection.plan import JudgedBy, Verdict
from torchair_scope.capture.extract import extract
from torchair_scope.capture.partition import Region
from torchair_scope.capture.tap_plan import is_view
from torchair_scope.store.arrays import UnsavableTensorError, to_numpy

Values = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Judged:
    """What is said of a piece; see `plan.Finding`."""

    verdict: Verdict
    reason: str
    error: float | None = None
    here: float | None = None
    value: str | None = None
    judged_by: JudgedBy = "eager"
    lacking: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()


class Piece:
    """A piece of a graph, and how it is judged.

    Args:
        gm: the graph.
        region: the piece of it.
        copies: for values that are overwritten later, the nodes that copy them.
    """

    def __init__(
        self, gm: fx.GraphModule, region: Region, copies: Mapping[fx.Node, fx.Node]
    ) -> None:
        piece = extract(gm, region)
        self._inputs = [copies.get(node, node) for node in piece.inputs]
        self._outputs = piece.outputs
        self._original = {copy: node for node, copy in copies.items()}
        self._run = RegionRun(piece.module)

    def judged(self, values: Values, golden: GoldenGraph | None, step: int) -> Judged:
        """Judge what the compiled code has made of this piece, given all that has flowed.

        With a golden dump, a piece is right whose results are the golden ones. Where they are not,
        compiled code is judged by a run on the piece's own inputs. If it is right by that, and
        began with the golden inputs, the graph is run on these: it may be another computation than
        the golden one, which no run of the graph itself could tell.
        """
        if not any(isinstance(values[node], torch.Tensor) for node in self._outputs):
            return Judged("unknown", "it gives no tensor to anyone")
        if golden is None:
            return self._by_a_run(values)
        inputs = self._golden(self._inputs, values, golden, step)
        outputs = self._golden(self._outputs, values, golden, step)
        results = self._compared(golden, outputs, values)
        if None not in outputs.values() and all(map(_surely_agrees, results.values())):
            reason = "its results are those of the golden dump, up to rounding"
            return Judged("agrees", reason, judged_by="golden")
        given = self._compared(golden, inputs, values)
        wrong = {node: each for node, each in results.items() if each.agreement == "differs"}
        strayed = [node for node, each in given.items() if each.agreement == "differs"]
        own = replace(
            self._by_a_run(values),
            strayed=tuple(node.name for node in strayed if node.op == "placeholder"),
        )
        if not strayed:  # else there is nothing that the missing values could tell
            lacking = _without(inputs) if wrong else _without(outputs)
            own = replace(own, lacking=tuple(node.name for node in lacking))
        begins_golden = None not in inputs.values() and all(each.agrees for each in given.values())
        if own.verdict == "differs" or not wrong or not begins_golden:
            return own
        worst = max(wrong, key=lambda node: _error(wrong[node]))
        return self._by_golden_inputs(own, values, inputs, outputs, (worst, wrong[worst]), given)

    def _golden(
        self, nodes: Iterable[fx.Node], values: Values, golden: GoldenGraph, step: int
    ) -> dict[fx.Node, Tensor | None]:
        """The golden tensor for each tensor among some values."""
        return {
            node: golden.tensor(self._original.get(node, node), values[node], step)
            for node in nodes
            if isinstance(values[node], torch.Tensor)
        }

    def _compared(
        self, golden: GoldenGraph, known: Mapping[fx.Node, Tensor | None], values: Values
    ) -> dict[fx.Node, TensorResult]:
        return {
            node: golden.compared(tensor, values[node], node.name)
            for node, tensor in known.items()
            if tensor is not None
        }

    def _by_golden_inputs(
        self,
        own: Judged,
        values: Values,
        inputs: Mapping[fx.Node, Tensor | None],
        outputs: Mapping[fx.Node, Tensor | None],
        worst: tuple[fx.Node, TensorResult],
        given: Mapping[fx.Node, TensorResult],
    ) -> Judged:
        """Judge whether the golden results are those of the piece for the golden inputs."""
        node, result = worst
        told = replace(own, judged_by="golden", value=node.name, error=_error(result))
        differs = replace(
            told,
            verdict="differs",
            reason=f"from golden inputs it comes to another {node.name}, off by "
            f"{_error(result):.1e} of the largest value. The code is compiled right: it is the "
            "graph that computes something else than the golden run",
        )
        try:
            arguments = [
                values[each] if tensor is None else tensor.torch(values[each].device)
                for each, tensor in ((each, inputs.get(each)) for each in self._inputs)
            ]
            judgement = judge(
                dict(self._golden_results(outputs)),
                Rerun(self._run, (tuple(arguments), {}), ""),
                torch.float64,
            )
        except (NotReplayableError, UnsavableTensorError, MissingTensorError) as error:
            judgement = Judgement("cannot", str(error))
        if judgement.verdict == "bug":
            return differs
        if _verdict(judgement) == "agrees":
            reason = "on golden inputs it gives the golden results: it amplifies rounding"
            return replace(told, verdict="agrees", reason=reason)
        if all(each.agreement == "equal" for each in given.values()):
            return differs
        return replace(told, verdict="unknown", reason=judgement.reason)

    def _golden_results(
        self, outputs: Mapping[fx.Node, Tensor | None]
    ) -> Iterator[tuple[str, Result]]:
        for index, node in enumerate(self._outputs):
            tensor = outputs.get(node)
            if tensor is not None:
                yield f"OUTPUT.{index}", Result(tensor.dtype, tensor.shape, tensor.numpy())

    def _by_a_run(self, values: Values) -> Judged:
        """Judge it by a run in eager mode and one in float64, on its own inputs."""
        given = tuple(values[node] for node in self._inputs)
        try:
            run = Rerun(self._run, (given, {}), "")
            judgement = judge(dict(self._results(values)), run, torch.float64)
        except (NotReplayableError, UnsavableTensorError) as error:
            judgement = Judgement("cannot", str(error))
        dumped, rerun = judgement.dumped, judgement.rerun
        return Judged(
            verdict=_verdict(judgement),
            reason=judgement.reason,
            error=dumped.max_relative if dumped else None,
            here=rerun.max_relative if rerun else None,
            value=judgement.slot and self._outputs[int(judgement.slot.rpartition(".")[2])].name,
        )

    def _results(self, values: Values) -> Iterator[tuple[str, Result]]:
        for index, node in enumerate(self._outputs):
            value = values[node]
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                yield f"OUTPUT.{index}", Result(dtype, tuple(value.shape), to_numpy(value))


def _verdict(judgement: Judgement) -> Verdict:
    if judgement.verdict == "bug":
        return "differs"
    # Many operators can take each other far from the reference; that a run here is as far says
    # that this is no fault of the compiled code.
    as_far = judgement.dumped is not None and judgement.rerun is not None
    return "agrees" if judgement.verdict == "rounding" or as_far else "unknown"


def _without(known: Mapping[fx.Node, Tensor | None]) -> list[fx.Node]:
    """The nodes for which nothing is known; views compute nothing that could be wrong."""
    return [node for node, tensor in known.items() if tensor is None and not is_view(node)]


def _surely_agrees(result: TensorResult) -> bool:
    return result.agrees and not result.is_suspicious


def _error(result: TensorResult) -> float:
    return result.metrics.max_relative if result.metrics else 0.0
