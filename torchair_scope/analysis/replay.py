"""Run dumped calls again: is a result a bug of its kernel, or rounding?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch

from torchair_scope.analysis.arguments import (
    Arguments,
    Device,
    by_slot,
    in_precision,
    load_arguments,
    map_leaves,
)
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.executors import Progress, run_in_turn, run_tasks
from torchair_scope.analysis.load import load
from torchair_scope.analysis.metrics import Metrics, measure
from torchair_scope.analysis.numerics import EPSILONS, is_float, rounded
from torchair_scope.analysis.operators import BIT_CASTS, NotReplayableError, operator_of
from torchair_scope.analysis.source import Array
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.store.arrays import to_numpy

Verdict = Literal["rounding", "bug", "cannot"]
Reference = Literal["float64", "float32"]

# A kernel may be this many times less exact than the one that runs here, and as inexact as this
# many roundings of each of its inputs make it.
_OF_RERUN = 8.0
_OF_SENSITIVITY = 4.0
_NARROW = 2.0**-10
_SEED = 20


@dataclass(frozen=True)
class Replay:
    """What running one call again has shown.

    Args:
        rank, graph, step, node, target, scope: the call.
        verdict: "rounding" if its result is as exact as its dtype allows, "bug" if it is not,
            "cannot" if that cannot be told.
        reason: why, in words.
        slot: the output that decides.
        dumped: the error of the dumped output against the reference.
        rerun: the error of the output of the run here, in the dumped dtype, against the reference.
    """

    rank: int
    graph: str
    step: int
    node: str
    target: str
    scope: str | None
    verdict: Verdict
    reason: str
    slot: str | None = None
    dumped: Metrics | None = None
    rerun: Metrics | None = None


@dataclass(frozen=True)
class _Finding:
    verdict: Verdict
    reason: str
    slot: str | None = None
    dumped: Metrics | None = None
    rerun: Metrics | None = None


def replay_call(call: Call, device: Device = "cpu", reference: Reference = "float64") -> Replay:
    """Run one call again, in its own dtype and in a higher precision.

        >>> import torch, torchair_scope as torchair
        >>> from torchair_scope.analysis.load import load
        >>> from torchair_scope.analysis.replay import replay_call
        >>> options = {"path": "./dump", "backend": "aot_eager"}
        >>> @torch.compile(backend="torchair_scope", options=options)
        ... @torchair.dump_ops
        ... def shift(x):
        ...     return x.sin() + 1
        >>> result = shift(torch.ones(3))
        >>> replay_call(load("./dump").calls()[0]).verdict
        'rounding'

    Args:
        call: from `torchair_scope.load`.
        device: where to run it.
        reference: the dtype of the exact run; integers and bools stay what they are.
    """
    try:
        finding = _find(call, device, getattr(torch, reference))
    except NotReplayableError as error:
        finding = _Finding("cannot", str(error))
    place = call.graph.rank.number, call.graph.name, call.step.number, call.node, call.target
    return Replay(*place, call.scope, **vars(finding))


def replay(
    dump: str | os.PathLike[str] | Dump,
    *,
    scope: str | None = None,
    node: str | None = None,
    step: int | None = None,
    device: str = "cpu",
    reference: Reference = "float64",
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Replay]:
    """Run the calls of a dump again, each in its own dtype and in a higher precision.

        >>> import torch, torchair_scope as torchair
        >>> from torchair_scope.analysis.replay import replay
        >>> options = {"path": "./dump", "backend": "aot_eager"}
        >>> @torch.compile(backend="torchair_scope", options=options)
        ... @torchair.dump_ops
        ... def shift(x):
        ...     return x.sin() + 1
        >>> result = shift(torch.ones(3))
        >>> [(each.node, each.verdict) for each in replay("./dump")]
        [('sin', 'rounding'), ('add', 'rounding')]

    Args:
        dump: by path, URL, or as `torchair_scope.load` gives it.
        scope: only the calls of this scope, as for `Dump.calls`.
        node: only the calls of this node.
        step: only the calls of this step of each graph.
        device: where to run them.
        reference: the dtype of the exact run; integers and bools stay what they are.
        executor: where they run: any `concurrent.futures.Executor`; here if None.
        progress: is called with the number of bytes that have been read since the last time.

    Raises:
        FileNotFoundError: there is no dump.
    """
    dump = dump if isinstance(dump, Dump) else load(dump)
    calls = dump.calls(scope=scope, node=node, step=step)
    sizes = [sum(tensor.size for tensor in call.tensors.values()) for call in calls]
    if executor is None:
        return run_in_turn(
            partial(replay_call, device=device, reference=reference), calls, sizes, progress
        )
    function = partial(_replay_at, device=device, reference=reference)
    return run_tasks(function, [_place(call) for call in calls], sizes, executor, progress)


_Place = tuple[str, str, int, int]


def _place(call: Call) -> _Place:
    """Where a call is; unlike the call itself, this is small."""
    return call.graph.rank.folder.url, call.graph.name, call.step.number, call.order


def _replay_at(place: _Place, device: str, reference: Reference) -> Replay:
    url, graph, step, order = place
    return replay_call(_calls_of(url)[graph, step, order], device, reference)


@cache
def _calls_of(url: str) -> dict[tuple[str, int, int], Call]:
    return {(call.graph.name, call.step.number, call.order): call for call in load(url).calls()}


def _find(call: Call, device: Device, reference: torch.dtype) -> _Finding:
    run = _Runner(operator_of(call), load_arguments(call, device), call.target)
    dumped = _dumped_outputs(call)
    rerun = run.as_dumped()
    if missing := [slot for slot in dumped if slot not in rerun]:
        return _Finding("bug", f"a run here gives no {missing[0]}", missing[0])
    exact = run.in_precision(reference)
    findings = []
    for slot, (tensor, array) in dumped.items():
        if tuple(rerun[slot].shape) != tensor.shape:
            shape = tuple(rerun[slot].shape)
            findings.append(_Finding("bug", f"its shape is {tensor.shape}, here {shape}", slot))
        else:
            judge = _Judge(slot, tensor.dtype, array, to_numpy(rerun[slot]), run, reference)
            findings.append(judge.finding(exact.get(slot)))
    return _worst(findings)


def _dumped_outputs(call: Call) -> dict[str, tuple[Tensor, Array]]:
    found = {}
    for slot, tensor in call.outputs.items():
        if tensor.description:
            try:
                found[slot] = tensor, tensor.numpy()
            except MissingTensorError as error:
                raise NotReplayableError(f"an output is missing: {error}") from error
    if not found:
        raise NotReplayableError("it has no tensor among its outputs")
    return found


def _worst(findings: Sequence[_Finding]) -> _Finding:
    rank = {"bug": 0, "cannot": 1, "rounding": 2}

    def key(finding: _Finding) -> tuple[int, float]:
        error = finding.dumped.max_relative if finding.dumped else 0.0
        return rank[finding.verdict], -error

    return min(findings, key=key)


class _Runner:
    """Runs one operator on its dumped arguments, or on ones near them."""

    def __init__(self, operator: Callable[..., Any], arguments: Arguments, target: str) -> None:
        self._operator = operator
        self._arguments = arguments
        self._target = target
        self.has_floats = False
        map_leaves(arguments, self._note)

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            self.has_floats = True

    def as_dumped(self) -> dict[str, torch.Tensor]:
        """The outputs in the dumped dtype."""
        try:
            return self._run(self._arguments)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            raise NotReplayableError(f"it fails here: {type(error).__name__}: {text}") from error

    def in_precision(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The outputs in a higher precision; none if the operator does not have it."""
        if self._target in BIT_CASTS:
            return {}
        try:
            return self._run(
                _without_half_to_float(self._target, in_precision(self._arguments, dtype))
            )
        except Exception:  # any operator may refuse a dtype, each in its own way
            return {}

    def near(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The outputs in a higher precision for arguments that are off by a rounding each."""
        generator = torch.Generator().manual_seed(_SEED)

        def shift(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
                return value
            epsilon = EPSILONS.get(str(value.dtype).removeprefix("torch."), 0.0)
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
            return value.to(dtype) * (1 + epsilon / 2 * signs)

        moved = in_precision(map_leaves(self._arguments, shift), dtype)
        return self._run(_without_half_to_float(self._target, moved))

    def _run(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        args, kwargs = map_leaves(arguments, _own_memory)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return by_slot(self._operator(*args, **kwargs))


def _own_memory(value: Any) -> Any:
    """An operator may change its arguments."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _without_half_to_float(target: str, arguments: Arguments) -> Arguments:
    if target not in ("aten._softmax.default", "aten._log_softmax.default"):
        return arguments
    (value, dim, *_), kwargs = arguments
    return (value, dim, False), kwargs


class _Judge:
    """Judges one output."""

    def __init__(
        self,
        slot: str,
        dtype: str,
        dumped: Array,
        rerun: Array,
        run: _Runner,
        reference: torch.dtype,
    ) -> None:
        self.slot = slot
        self.dtype = dtype
        self.dumped = dumped
        self.rerun = rerun
        self.run = run
        self.reference = reference

    def finding(self, exact: torch.Tensor | None) -> _Finding:
        """Judge it, by the exact result if there is one."""
        if not is_float(self.dtype):
            return self._of_integers()
        if exact is None or tuple(exact.shape) != self._true_shape():
            return self._without_reference()
        return self._with_reference(rounded(to_numpy(exact), self.dtype))

    def _true_shape(self) -> tuple[int, ...]:
        return tuple(self.dumped.shape)

    def _of_integers(self) -> _Finding:
        errors = measure(self.rerun, self.dumped)
        if errors.equal:
            return _Finding("rounding", "equal to a run here", self.slot, errors, errors)
        if self.run.has_floats and self.dtype == "int64":
            reason = "other indices than a run here: ties may be broken in another order"
            return _Finding("cannot", reason, self.slot, errors)
        reason = f"{errors.beyond} of {errors.count} elements are not those of a run here"
        return _Finding("bug", reason, self.slot, errors)

    def _without_reference(self) -> _Finding:
        errors = measure(self.rerun, self.dumped, self.dtype, self.dtype)
        told = "the operator does not run in a higher precision"
        if not errors.mismatches and errors.max_absolute <= _OF_RERUN * errors.rounding_budget:
            return _Finding("rounding", f"as a run here; {told}", self.slot, errors)
        reason = f"off by {errors.max_relative:.1e} from a run here; {told}"
        return _Finding("bug", reason, self.slot, errors)

    def _with_reference(self, exact: Array) -> _Finding:
        dumped = measure(exact, self.dumped, "float64", self.dtype)
        rerun = measure(exact, self.rerun, "float64", self.dtype)
        errors = (self.slot, dumped, rerun)
        if _is_within(dumped, _Errors(0.0, 0.0)):
            return _Finding("rounding", "as exact as its dtype allows", *errors)
        sensitivity = self._sensitivity(exact)
        if _is_within(dumped, sensitivity.times(_OF_SENSITIVITY)):
            return _Finding("rounding", "no worse than a rounding of its inputs", *errors)
        here = _Errors(rerun.max_absolute, rerun.rmse).times(_OF_RERUN)
        if dumped.mismatches <= rerun.mismatches and _is_within(dumped, here, mismatches=True):
            reason = "far from the reference, and so is a run here: not the fault of one kernel"
            return _Finding("cannot", reason, *errors)
        return _Finding("bug", _told(dumped, rerun), *errors)

    def _sensitivity(self, exact: Array) -> _Errors:
        """How far the exact result moves if each input is off by a rounding."""
        try:
            moved = rounded(to_numpy(self.run.near(self.reference)[self.slot]), self.dtype)
            errors = measure(exact, moved, "float64", "float64")
        except Exception:  # what cannot be computed so excuses nothing
            return _Errors(0.0, 0.0)
        return _Errors(errors.max_absolute, errors.rmse)


class _Errors(NamedTuple):
    """An error that is excused."""

    largest: float
    rmse: float

    def times(self, factor: float) -> _Errors:
        """A multiple of it."""
        return _Errors(self.largest * factor, self.rmse * factor)


def _is_within(errors: Metrics, excused: _Errors, mismatches: bool = False) -> bool:
    """Whether errors are those of rounding, apart from what is excused.

    Of a narrow dtype only the result is rounded, since kernels sum up in float32.
    """
    if errors.mismatches and not mismatches:
        return False
    narrow = errors.epsilon >= _NARROW
    relative = errors.epsilon if narrow else errors.tolerance.relative
    return (
        errors.max_absolute <= errors.rounding_budget + excused.largest
        and errors.rmse <= relative * errors.golden_rms + excused.rmse
    )


def _told(dumped: Metrics, rerun: Metrics) -> str:
    if dumped.nan_mismatches:
        return f"{dumped.nan_mismatches} elements are NaN on one side only"
    if dumped.infinity_mismatches:
        return f"{dumped.infinity_mismatches} elements are infinite on one side only"
    return (
        f"off by {dumped.max_relative:.1e} of the largest value; a run here is off by "
        f"{rerun.max_relative:.1e}"
    )
