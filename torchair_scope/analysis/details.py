"""What a report shows of one tensor: histograms, and where in it the errors are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchair_scope.analysis.blocks import blocks, flat_reals
from torchair_scope.analysis.judgement import TensorResult
from torchair_scope.analysis.source import Array
from torchair_scope.analysis.statistics import statistics_of
from torchair_scope.analysis.tensors import MissingTensorError, Tensor

_BINS = 40
_FARTHEST = 1e307  # what lies beyond is drawn there: the width of a bin has to be a number
_SIDE = 48  # cells of a heat map along each side


def detail_of(result: TensorResult, golden: Tensor, target: Tensor) -> dict[str, Any]:
    """Statistics, histograms and heat map of one pair of tensors."""
    detail: dict[str, Any] = {
        "slot": result.slot,
        "agreement": result.agreement,
        "dtypes": list(result.dtypes),
        "reason": result.reason,
        "metrics": _metrics(result),
    }
    try:
        arrays = golden.numpy(), target.numpy()
    except MissingTensorError:
        return detail
    detail["shape"] = "x".join(map(str, target.shape)) or "scalar"
    detail["golden"] = numbers_of(arrays[0])
    detail["target"] = numbers_of(arrays[1])
    detail["histogram"] = histograms(*arrays)
    if result.metrics is not None and result.metrics.worst is not None:
        detail["heat"] = heat_map(*arrays, result.metrics.worst.index)
    return detail


def numbers_of(array: Array) -> dict[str, Any]:
    """Statistics of an array, as JSON."""
    found = vars(statistics_of(array)).items()
    return {name: number_of(value) for name, value in found if name != "hash"}


def histograms(*arrays: Array) -> dict[str, Any]:
    """Counts of the finite values of some arrays, over the same bins."""
    found = [statistics_of(array) for array in arrays]
    low = min((each.minimum for each in found if math.isfinite(each.minimum)), default=0.0)
    high = max((each.maximum for each in found if math.isfinite(each.maximum)), default=1.0)
    low, high = np.clip((low, high if high > low else low + 1.0), -_FARTHEST, _FARTHEST)
    edges = np.linspace(low, high, _BINS + 1)
    counts = []
    for array in arrays:
        total = np.zeros(_BINS, np.int64)
        for _, (block,) in blocks(flat_reals(array)):
            values = block.astype(np.float64)
            values = values[np.isfinite(values)].clip(-_FARTHEST, _FARTHEST)
            total += np.histogram(values, edges)[0]
        counts.append(total.tolist())
    return {"edges": edges.tolist(), "counts": counts}


def heat_map(golden: Array, target: Array, worst: tuple[int, ...]) -> dict[str, Any] | None:
    """The largest errors in the slice of the last two dimensions that holds the worst element."""
    if golden.shape != target.shape or golden.ndim == 0:
        return None
    leading = worst[: max(golden.ndim - 2, 0)]
    one, other = (_as_matrix(array[leading]) for array in (golden, target))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(other - one)
    error[np.isnan(one) & np.isnan(other)] = 0.0
    error[~np.isfinite(error)] = np.inf
    cells = _pooled(error)
    finite = cells[np.isfinite(cells)]
    ceiling = float(finite.max()) if finite.size else 1.0
    return {
        "slice": f"[{', '.join([*map(str, leading), ':', ':'])}]" if leading else "",
        "cells": np.where(np.isfinite(cells), cells, 2 * ceiling).tolist(),
    }


def _as_matrix(array: Array) -> Array:
    kind = np.complex128 if array.dtype.kind == "c" else np.float64
    return np.atleast_2d(np.asarray(array).astype(kind))


def _pooled(error: Array) -> Array:
    """The largest error of each cell."""
    for axis, size in enumerate(error.shape):
        if size > _SIDE:
            starts = np.linspace(0, size, _SIDE, endpoint=False).astype(int)
            error = np.maximum.reduceat(error, starts, axis=axis)
    return error


def _metrics(result: TensorResult) -> dict[str, Any] | None:
    metrics = result.metrics
    if metrics is None:
        return None
    worst = metrics.worst
    return {
        "largest error": number_of(metrics.max_absolute),
        "mean error": number_of(metrics.mean_absolute),
        "largest error / largest value": number_of(metrics.max_relative),
        "RMSE": number_of(metrics.rmse),
        "cosine": number_of(metrics.cosine),
        "largest ULP distance": number_of(metrics.max_ulp),
        "beyond tolerance": f"{metrics.beyond} of {metrics.count}",
        "NaN mismatches": metrics.nan_mismatches,
        "Inf mismatches": metrics.infinity_mismatches,
        "worst element": None
        if worst is None
        else f"{list(worst.index)}: {worst.target:.6g}, golden {worst.golden:.6g}",
    }


def number_of(value: float | None) -> float | str | None:
    """A number as JSON has it: NaN and infinities are text."""
    if value is None or isinstance(value, int):
        return value
    return value if math.isfinite(value) else str(value)
