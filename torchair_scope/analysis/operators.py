"""Find the operator of a call, or the reason why the call cannot be run again."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any

from torchair_scope.analysis.dump import Call

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "_dtensor.")
_BUILTIN = re.compile(r"<built-in function (\w+)>")
_UNDEFINED = re.compile(r"aten\.(new_)?empty(_like|_strided|_permuted|_quantized)?\.")
_RANDOM = re.compile(
    r"aten\.(native_dropout|bernoulli|multinomial|rand|randn|randint|randperm|normal|uniform"
    r"|exponential|geometric|cauchy|log_normal|poisson|rrelu_with_noise)[._]"
)
# Takes bits for what they are: there is nothing to compute with more precision.
BIT_CASTS = ("aten.view.dtype", "aten.view_as_real.default", "aten.view_as_complex.default")


class NotReplayableError(Exception):
    """A call cannot be run again from its files; the text says why."""


def operator_of(call: Call) -> Callable[..., Any]:
    """The operator of a call.

    **Raises:** `NotReplayableError` if it cannot be run again, or would not give the same.
    """
    reason = _reason_against(call)
    if reason is not None:
        raise NotReplayableError(reason)
    try:
        return resolve(call.target)
    except AttributeError:
        raise NotReplayableError(
            f"{call.operator} is not registered in this process; import what defines it "
            "(--import on the command line)"
        ) from None


def resolve(target: str) -> Callable[..., Any]:
    """The operator called `target` in a record, as `aten.add.Tensor`.

    A name without a dot is a higher-order operator; `<built-in function mul>` works on sizes.

    **Raises:** `AttributeError` if there is none.
    """
    builtin = _BUILTIN.fullmatch(target)
    if builtin is not None:
        return getattr(operator, builtin[1])  # type: ignore[no-any-return]
    import torch

    found: Any = torch.ops if "." in target else torch.ops.higher_order
    for part in target.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _reason_against(call: Call) -> str | None:
    if call.record is None:
        return "without a manifest its arguments are not all known"
    if not call.finished:
        return "it did not return"
    if call.is_random or _RANDOM.match(call.operator):
        return "it draws random numbers"
    if call.operator.startswith(_COLLECTIVES):
        return "it is a collective: its result depends on the other processes"
    if _UNDEFINED.match(call.operator):
        return "the values of its result are not defined"
    arguments = json.dumps([call.record.get("args"), call.record.get("kwargs")])
    if '"graph_module"' in arguments:
        return "it takes a graph, of which only the text is kept"
    if '"repr"' in arguments:
        return "it has an argument of which only the text is kept"
    return None
