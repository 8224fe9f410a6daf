"""Statistics of one tensor, read a block at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torchair_scope.analysis.blocks import blocks, flat_reals
from torchair_scope.analysis.source import Array


@dataclass(frozen=True)
class Statistics:
    """What is in a tensor. NaN and infinite elements are counted, and left out of the rest.

    Of complex numbers the parts are taken, so that `count` is twice the number of elements.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    norm: float
    zeros: int
    nans: int
    infinities: int


def statistics_of(array: Array) -> Statistics:
    """Statistics of an array of numbers.

    >>> import numpy as np
    >>> from torchair_scope.analysis.statistics import statistics_of
    >>> found = statistics_of(np.array([3.0, -4.0, np.nan]))
    >>> found.minimum, found.maximum, found.mean, found.norm, found.nans
    (-4.0, 3.0, -0.5, 5.0, 1)
    """
    count = nans = infinities = zeros = 0
    minimum, maximum, total, squares = math.inf, -math.inf, 0.0, 0.0
    for _, (block,) in blocks(flat_reals(array)):
        count += block.size
        values = block.astype(np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            block_nans = int(np.isnan(values).sum())
            nans += block_nans
            infinities += int(values.size - finite.sum()) - block_nans
            values = values[finite]
        if values.size:
            minimum = min(minimum, float(values.min()))
            maximum = max(maximum, float(values.max()))
            zeros += int(values.size - np.count_nonzero(values))
            total += float(values.sum())
            squares += float(values @ values)
    finite_count = count - nans - infinities
    if finite_count == 0:
        minimum = maximum = math.nan
    mean = total / finite_count if finite_count else math.nan
    norm = math.sqrt(squares)
    return Statistics(count, minimum, maximum, mean, norm, zeros, nans, infinities)
