"""Where an error was made, and where it is carried on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from torchair_scope.analysis.blocks import blocks, flat_reals
from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.numerics import epsilon_of
from torchair_scope.analysis.pairing import CallPair
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

# "suspect" is for as long as it is not confirmed: it agrees since all its values are small.
Role = Literal["agrees", "suspect", "made", "carries", "amplifies", "unclear"]
ROLES: dict[Role, str] = {
    "agrees": "its outputs agree",
    "made": "its inputs agree and its outputs do not: the error is made here",
    "carries": "its inputs differ already",
    "amplifies": "it is right, and makes the rounding of its inputs larger",
    "unclear": "its outputs differ, and it cannot be told whether its inputs do",
}
Kind = Literal["agrees", "made", "outside", "unclear"]


@dataclass(frozen=True)
class CallResult:
    """What is known of one pair of calls.

    Args:
        pair: the golden and the target's call.
        tensors: the results for their inputs and outputs.
        role: what the call does to the error; see `ROLES`.
        reason: why, in words, where the role does not say it.
    """

    pair: CallPair
    tensors: list[TensorResult]
    role: Role = "agrees"
    reason: str | None = None

    @property
    def inputs(self) -> list[TensorResult]:
        """The results for the arguments."""
        return [result for result in self.tensors if result.is_input]

    @property
    def outputs(self) -> list[TensorResult]:
        """The results for what was returned."""
        return [result for result in self.tensors if not result.is_input]

    @property
    def worst_output(self) -> TensorResult | None:
        """The output with the largest error."""
        return max(self.outputs, key=_badness, default=None)

    @property
    def worst_input(self) -> TensorResult | None:
        """The input with the largest error."""
        return max(self.inputs, key=_badness, default=None)


@dataclass(frozen=True)
class Verdict:
    """Where the error was made.

    Args:
        kind: "agrees": nowhere. "made": in `call`. "outside": before or between the scopes, since
            `slot` of `call` differs and no dumped operator has computed it. "unclear": the dumps
            do not tell.
        text: the same in a sentence.
        call: the call that it is about.
        slot: the tensor of it.
    """

    kind: Kind
    text: str
    call: CallResult | None = field(repr=False, default=None)
    slot: str | None = None


def judge(results: Sequence[CallResult], confirm: bool = True) -> tuple[Verdict, list[CallResult]]:
    """Give each call its role, and the verdict on all of them."""
    judged = [_with_role(result) for result in results]
    if confirm:
        judged = [_confirmed(result) for result in judged]
    judged = [replace(each, role="agrees") if each.role == "suspect" else each for each in judged]
    return _verdict(judged), judged


def _badness(result: TensorResult) -> tuple[int, float, float]:
    order = ("equal", "close", "rounding", "unknown", "differs").index(result.agreement)
    metrics = result.metrics
    if metrics is None:
        return order, 0.0, 0.0
    return order, float(metrics.mismatches), metrics.max_relative


def _with_role(result: CallResult) -> CallResult:
    outputs, inputs = result.outputs, result.inputs
    if all(output.agreement != "differs" for output in outputs):
        unknown = outputs and all(output.agreement == "unknown" for output in outputs)
        if unknown or not outputs:
            return replace(result, role="unclear", reason="no output can be compared")
        starts = any(output.is_suspicious for output in outputs)
        ends = any(each.is_suspicious or not each.agrees for each in inputs)
        return replace(result, role="suspect") if starts and not ends else result
    if any(each.agreement == "differs" for each in inputs):
        return replace(result, role="carries")
    if result.pair.target.is_random or result.pair.golden.is_random:
        return replace(result, role="unclear", reason="it draws random numbers")
    if result.pair.rule == "shape":
        return replace(result, role="unclear", reason="the other side has several operators here")
    lost = [each.slot for each in inputs if each.agreement == "unknown"]
    if lost:
        return replace(result, role="unclear", reason=f"{lost[0]} cannot be compared")
    return replace(result, role="made")


def _confirmed(result: CallResult) -> CallResult:
    """Run an operator that seems to have made an error on the target's own inputs."""
    if result.role not in ("made", "suspect"):
        return result
    from torchair_scope.analysis.replay import replay_call

    replayed = replay_call(result.pair.target)
    if replayed.verdict == "bug":
        return replace(result, role="made", reason=f"confirmed by a replay: {replayed.reason}")
    if result.role == "suspect":
        return result
    inputs_equal = all(each.agreement == "equal" for each in result.inputs)
    if replayed.verdict == "rounding" and not inputs_equal:
        return replace(result, role="amplifies", reason=f"replayed: {replayed.reason}")
    if replayed.verdict == "rounding":
        return _golden_is_wrong(result) or replace(
            result, role="amplifies", reason=f"replayed: {replayed.reason}"
        )
    if inputs_equal:
        return replace(result, reason=f"its inputs are equal; not replayed: {replayed.reason}")
    replays = "replayed" if replayed.rerun else "not replayed"
    text = f"its inputs are off by rounding, which it may amplify; {replays}: {replayed.reason}"
    return replace(result, role="unclear", reason=text)


def _golden_is_wrong(result: CallResult) -> CallResult | None:
    from torchair_scope.analysis.replay import replay_call

    replayed = replay_call(result.pair.golden)
    if replayed.verdict != "bug":
        return None
    return replace(result, reason=f"the golden run is wrong here, replayed: {replayed.reason}")


def _verdict(results: Sequence[CallResult]) -> Verdict:
    if not results:
        return Verdict("unclear", "the two dumps have no operator in common")
    made = next((result for result in results if result.role == "made"), None)
    before = results[: results.index(made)] if made else results
    outside = next(_from_outside(before), None)
    if outside is not None:
        return _made_outside(*outside, results)
    if made is not None:
        return _made(made)
    unclear = [result for result in results if result.role == "unclear"]
    if unclear:
        text = f"{len(unclear)} operators cannot be judged, the first is {unclear[0].pair.target}"
        return Verdict("unclear", f"{text}: {unclear[0].reason}", unclear[0])
    return _agrees(results)


def _made(result: CallResult) -> Verdict:
    call, output = result.pair.target, result.worst_output
    slot = output.slot if output else None
    text = f"{call} makes the error: its inputs agree and its {slot} does not"
    return Verdict("made", text if not result.reason else f"{text}; {result.reason}", result, slot)


def _made_outside(result: CallResult, slot: str, results: Sequence[CallResult]) -> Verdict:
    call = result.pair.target
    earlier = results[: results.index(result)]
    amplifying = next((each for each in earlier if each.role == "amplifies"), None)
    if amplifying is not None:
        text = (
            f"{slot} of {call} differs and comes from outside; that may be the rounding which "
            f"{amplifying.pair.target} has amplified before"
        )
        return Verdict("unclear", text, result, slot)
    scope = f"scope {call.scope!r}" if call.scope else "the dumped operators"
    text = (
        f"the inputs of {scope} differ already: {slot} of {call} is the first, and no dumped "
        "operator computes it. The error was made outside; dump what comes before"
    )
    return Verdict("outside", text, result, slot)


def _agrees(results: Sequence[CallResult]) -> Verdict:
    amplified = [result for result in results if result.role == "amplifies"]
    text = f"no operator makes an error; {len(results)} were compared, {_how_closely(results)}"
    if amplified:
        text += f"; {len(amplified)} amplify the rounding of their inputs"
    return Verdict("agrees", text)


def _how_closely(results: Sequence[CallResult]) -> str:
    """What the largest error is among those that agree."""
    agreeing = [result for result in results if result.role == "agrees" and result.worst_output]
    worst = max(agreeing, key=_output_error, default=None)
    if worst is None or _output_error(worst) == 0:
        return "and all of their outputs are equal"
    dtypes = {dtype for result in agreeing for each in result.outputs for dtype in each.dtypes}
    coarsest = max(sorted(dtypes), key=epsilon_of)
    place = f"{worst.worst_output.slot} of {worst.pair.target}" if worst.worst_output else ""
    return (
        f"and they agree up to rounding of {coarsest}; the largest error is "
        f"{_output_error(worst):.1e} of the largest value, in {place}"
    )


def _output_error(result: CallResult) -> float:
    output = result.worst_output
    return output.metrics.max_relative if output is not None and output.metrics else 0.0


def _from_outside(results: Iterable[CallResult]) -> Iterator[tuple[CallResult, str]]:
    """Inputs that differ and that no dumped operator has computed, in order."""
    earlier: list[CallResult] = []
    for result in results:
        for each in result.inputs:
            if each.agreement == "differs" and not _is_computed(result, each.slot, earlier):
                yield result, each.slot
        earlier.append(result)


def _is_computed(result: CallResult, slot: str, earlier: Sequence[CallResult]) -> bool:
    tensor = result.pair.target.tensors[slot]
    return any(
        same_values(tensor, output)
        for before in reversed(earlier)
        for output in before.pair.target.outputs.values()
        if output.size == tensor.size
    )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same; not if one of them cannot be read."""
    if one.identity is not None and one.identity == other.identity:
        return True
    try:
        arrays = one.numpy(), other.numpy()
    except MissingTensorError:
        return False
    if arrays[0].shape != arrays[1].shape:
        return False
    rows = flat_reals(arrays[0]), flat_reals(arrays[1])
    equal_nan = rows[0].dtype.kind == "f"
    return all(
        np.array_equal(left, right, equal_nan=equal_nan) for _, (left, right) in blocks(*rows)
    )
