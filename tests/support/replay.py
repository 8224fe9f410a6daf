"""Re-run dumped calls from their files and records: the test of a dump's completeness."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.support.bits import difference
from torchair_scope.store.reader import Call, Dump

COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "_dtensor.")


@dataclass(frozen=True)
class Verdict:
    """`detail` says what differs, or why the call was skipped."""

    kind: Literal["equal", "different", "skipped"]
    detail: str = ""


def replay(call: Call) -> Verdict:
    """Run `call` again on the arguments that were dumped and compare with the dumped outputs.

    Outputs have to be equal bit for bit, with the same dtype, shape and strides, and so have
    arguments that the operator writes to and does not return. Random operators,
    collectives and operators that take a graph are skipped.
    """
    reason = _reason_to_skip(call)
    if reason is not None:
        return Verdict("skipped", reason)
    args, kwargs = call.load_args()
    with torch.no_grad():
        outputs = resolve(call.target)(*args, **kwargs)
    detail = difference(outputs, call.load_outputs()) or _difference_in_mutated(call, args, kwargs)
    return Verdict("equal") if detail is None else Verdict("different", detail)


def _difference_in_mutated(call: Call, args: tuple, kwargs: dict[str, Any]) -> str | None:
    mutated = call.load_mutated()
    if not mutated:
        return None
    parameters = [argument.name for argument in resolve(call.target)._schema.arguments]
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    return difference([given[name] for name in mutated], list(mutated.values()))


def assert_replays(dump: Dump) -> list[Verdict]:
    """Replay every call of a dump, of which there must be at least one."""
    calls = [call for rank in dump.ranks for call in rank.calls]
    assert calls, "the dump holds no call"
    verdicts = [replay(call) for call in calls]
    different = [
        f"graph {call.graph} step {call.step} {call.node} ({call.target}): {verdict.detail}"
        for call, verdict in zip(calls, verdicts, strict=True)
        if verdict.kind == "different"
    ]
    assert not different, "\n".join(different)
    return verdicts


def resolve(target: str) -> Callable[..., Any]:
    """The operator called `target` in a record, as `aten.add.Tensor`.

    A name without a dot is a higher-order operator; `<built-in function mul>` works on sizes.
    """
    builtin = re.fullmatch(r"<built-in function (\w+)>", target)
    if builtin is not None:
        return getattr(operator, builtin[1])
    if "." not in target:
        return getattr(torch.ops.higher_order, target)
    return functools.reduce(getattr, target.split("."), torch.ops)


def _reason_to_skip(call: Call) -> str | None:
    if call.record.get("nondeterministic"):
        return "random operator"
    if not call.finished:
        return "the operator did not return"
    if call.target.startswith(COLLECTIVES):
        return "collective"
    if '"graph_module"' in json.dumps(call.record):
        return "takes a graph"
    return None
