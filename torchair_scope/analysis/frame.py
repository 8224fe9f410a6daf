"""A dump as a pandas DataFrame, one row a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchair_scope.analysis.dump import Call, Dump
from torchair_scope.analysis.extras import need
from torchair_scope.analysis.statistics import statistics_of_tensor
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

if TYPE_CHECKING:
    import pandas


def frame_of(dump: Dump, *, statistics: bool = True) -> pandas.DataFrame:
    """One row a tensor; `Dump.frame` gives it."""
    rows = [
        _row(call, tensor, statistics) for call in dump.calls() for tensor in call.tensors.values()
    ]
    frame: pandas.DataFrame = need("pandas").DataFrame(rows)
    return frame


def _row(call: Call, tensor: Tensor, statistics: bool) -> dict[str, Any]:
    source = call.source or {}
    row = {
        "rank": call.graph.rank.number,
        "graph": call.graph.name,
        "direction": call.graph.direction,
        "step": call.step.number,
        "order": call.order,
        "scope": call.scope,
        "node": call.node,
        "target": call.target,
        "module": call.module,
        "file": source.get("file"),
        "line": source.get("line"),
        "slot": tensor.slot,
        "bytes": tensor.size,
        "problem": tensor.reason,
    }
    try:
        row |= {"dtype": tensor.dtype, "shape": "x".join(map(str, tensor.shape))}
        if statistics:
            row |= vars(statistics_of_tensor(tensor))
    except MissingTensorError as error:
        row["problem"] = str(error)
    return row
