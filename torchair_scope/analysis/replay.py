"""Run dumped calls again: is a result a bug of its kernel, or rounding?"""

from __future__ import annotations

import os
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache, partial

import torch

from torchair_scope.analysis.arguments import Device, load_arguments
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.executors import Progress, run_in_turn, run_tasks
from torchair_scope.analysis.load import load
from torchair_scope.analysis.metrics import Metrics
from torchair_scope.analysis.operators import NotReplayableError, operator_of
from torchair_scope.analysis.rerun import Finding, Reference, Rerun, Result, Verdict, judge
from torchair_scope.analysis.tensors import MissingTensorError

__all__ = ["Reference", "Replay", "Verdict", "replay", "replay_call"]


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
        finding = Finding("cannot", str(error))
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
        ValueError: there is no such device here.
    """
    _check(device)
    dump = dump if isinstance(dump, Dump) else load(dump)
    calls = dump.calls(scope=scope, node=node, step=step)
    sizes = [sum(tensor.size for tensor in call.tensors.values()) for call in calls]
    if executor is None:
        return run_in_turn(
            partial(replay_call, device=device, reference=reference), calls, sizes, progress
        )
    function = partial(_replay_at, device=device, reference=reference)
    return run_tasks(function, [_place(call) for call in calls], sizes, executor, progress)


def _check(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each device has its own way to say no
        text = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"device is {device!r}, which cannot be used here: {text}. 'cpu' always can; some "
            "devices need a module that is imported first, as torch_npu: --import torch_npu"
        ) from error


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


def _find(call: Call, device: Device, reference: torch.dtype) -> Finding:
    run = Rerun(operator_of(call), load_arguments(call, device), call.target)
    return judge(_dumped_outputs(call), run, reference)


def _dumped_outputs(call: Call) -> dict[str, Result]:
    found = {}
    for slot, tensor in call.outputs.items():
        if tensor.sample is not None:
            raise NotReplayableError(f"{slot} is sampled: only {tensor.sample} of it was saved")
        if tensor.description:
            try:
                found[slot] = Result(tensor.dtype, tensor.shape, tensor.numpy())
            except MissingTensorError as error:
                raise NotReplayableError(f"an output is missing: {error}") from error
    if not found:
        raise NotReplayableError("it has no tensor among its outputs")
    return found
