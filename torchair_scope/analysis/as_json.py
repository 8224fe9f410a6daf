"""Results as JSON, for machines."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchair_scope.analysis.account import account_of
from torchair_scope.analysis.compare import Comparison
from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.replay import Replay
from torchair_scope.analysis.verdict import CallResult


def json_of_comparison(comparison: Comparison) -> dict[str, Any]:
    """A comparison: the verdict, each call with its tensors, and what is missing."""
    verdict = comparison.verdict
    return {
        "verdict": verdict.kind,
        "text": verdict.text,
        "call": json_of_call(verdict.call.pair.target) if verdict.call else None,
        "slot": verdict.slot,
        "calls": [_call_result(result) for result in comparison.results],
        "only_golden": [json_of_call(call) for call in comparison.only_golden],
        "only_target": [json_of_call(call) for call in comparison.only_target],
        "notes": comparison.notes,
    }


def json_of_replay(replayed: Replay) -> dict[str, Any]:
    """One replayed call."""
    return plain(dataclasses.asdict(replayed))  # type: ignore[no-any-return]


def json_of_dump(dump: Dump) -> dict[str, Any]:
    """What `ls` shows."""
    return {
        "path": dump.folder.url,
        "scopes": dump.scopes,
        "runs": dump.runs,
        "graphs": [
            {
                "rank": graph.rank.number,
                "graph": graph.name,
                "direction": graph.direction,
                "inner": graph.record.get("inner"),
                "steps": [step.number for step in graph.steps],
                "calls": sum(len(step.calls) for step in graph.steps),
                "bytes": bytes_of([call for step in graph.steps for call in step.calls]),
            }
            for graph in dump.graphs
        ],
        "account": [vars(row) for rank in dump.ranks for row in account_of(rank)],
        "problems": dump.problems,
    }


def json_of_call(call: Call) -> dict[str, Any]:
    """Where a call is, and what it is."""
    return {
        "rank": call.graph.rank.number,
        "graph": call.graph.name,
        "step": call.step.number,
        "order": call.order,
        "node": call.node,
        "target": call.target,
        "scope": call.scope,
        "module": call.module,
        "source": call.source,
    }


def bytes_of(calls: list[Call]) -> int:
    """The size of the files of some calls."""
    return sum(tensor.size for call in calls for tensor in call.tensors.values())


def _call_result(result: CallResult) -> dict[str, Any]:
    return {
        "role": result.role,
        "reason": result.reason,
        "rule": result.pair.rule,
        "golden": json_of_call(result.pair.golden),
        "target": json_of_call(result.pair.target),
        "tensors": [_tensor(tensor) for tensor in result.tensors],
    }


def _tensor(result: TensorResult) -> dict[str, Any]:
    return plain(dataclasses.asdict(result))  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """What JSON has words for: NaN and infinities become text."""
    if isinstance(value, dict):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
