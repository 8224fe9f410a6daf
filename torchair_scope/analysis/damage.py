"""What is cut or missing in the dump of one process, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchair_scope.analysis.tensors import MissingTensorError

if TYPE_CHECKING:
    from torchair_scope.analysis.dump import Call, Rank, Step
    from torchair_scope.analysis.tensors import Tensor


def problems_of(rank: Rank) -> Iterator[str]:
    """Say what is wrong with each step and each call of a rank."""
    for graph in rank.graphs:
        if rank.has_manifest and not graph.record:
            yield f"{graph.name} has no record: its direction and its nodes are not known"
        for step in graph.steps:
            if rank.has_manifest:
                yield from _problems_of_step(step)
            for call in step.calls:
                yield from _problems_of_call(call, rank.has_manifest)


def _problems_of_step(step: Step) -> Iterator[str]:
    if step.record is None:
        yield f"{step} did not end: it has no step record"
    elif not step.record.get("complete", True):
        reasons = "; ".join(step.record.get("problems", ())) or "see its calls"
        yield f"{step} is incomplete: {reasons}"
    elif len(step.calls) < int(step.record.get("calls", 0)):
        yield f"{step} had {step.record['calls']} calls, of which {len(step.calls)} are recorded"


def _problems_of_call(call: Call, has_manifest: bool) -> Iterator[str]:
    if has_manifest and call.record is None:
        yield f"{call} has files and no record: it did not end, or its record is lost"
    if not call.finished:
        yield f"{call}: the operator did not return"
    if call.record is None and not call.outputs:
        yield f"{call} has no output"
    for tensor in call.tensors.values():
        if tensor.file is None and tensor.statistics is not None and not _is_lost(call, tensor):
            continue
        if tensor.file is None:
            yield f"{call}: {tensor.slot} is not on disk: {tensor.reason}"
            continue
        try:
            tensor.check()
        except MissingTensorError as error:
            yield f"{call}: {error}"


def _is_lost(call: Call, tensor: Tensor) -> bool:
    """Whether more than statistics was to be saved of a tensor."""
    record = call.record or {}
    slots = {*record.get("files", {}), *(lost["slot"] for lost in record.get("missing", ()))}
    return tensor.slot in slots
