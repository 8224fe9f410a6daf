"""Statistics of one tensor: measured as the store does, or as its `stats.csv` has them."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from torchair_scope.analysis.source import Array
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.store import measuring
from torchair_scope.store.statistics import STATISTICS, Statistics

__all__ = ["STATISTICS", "Statistics", "statistics_of", "statistics_of_tensor"]


@np.errstate(over="ignore")
def statistics_of(array: Array) -> Statistics:
    """Statistics of an array of numbers, taken as one of its own dtype.

    >>> import numpy as np
    >>> from torchair_scope.analysis.statistics import statistics_of
    >>> found = statistics_of(np.array([3.0, -4.0, np.nan]))
    >>> found.minimum, found.maximum, found.mean, found.norm, found.nans
    (-4.0, 3.0, -0.5, 5.0, 1)
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return measuring.statistics_of(torch.from_numpy(np.ascontiguousarray(array)))


def statistics_of_tensor(tensor: Tensor) -> Statistics:
    """Statistics of a tensor of a dump, of its true dtype.

    Those that were saved are given where there is no file, or one with a part of it only.

    **Raises:** `MissingTensorError` if there is neither a file nor statistics.
    """
    if tensor.statistics is not None and (tensor.file is None or tensor.sample is not None):
        return tensor.statistics
    if tensor.description:
        return measuring.statistics_of(tensor.torch())
    return statistics_of(tensor.numpy())


def compared(golden: Tensor, target: Tensor) -> tuple[bool, str] | None:
    """What the statistics of two tensors tell: whether they are equal, and in words.

    None if there are none, or if both have their files.
    """
    if golden.file is not None and target.file is not None and golden.sample == target.sample:
        return None
    try:
        one, other = statistics_of_tensor(golden), statistics_of_tensor(target)
    except MissingTensorError:
        return None
    if (golden.dtype, golden.shape) == (target.dtype, target.shape) and one.hash == other.hash:
        return True, "by the hash of their bits: only statistics are there"
    differ = [
        f"{name} {_text(getattr(one, name))} and {_text(getattr(other, name))}"
        for name in ("minimum", "maximum", "mean", "std", "norm", "nans", "infinities")
        if _text(getattr(one, name)) != _text(getattr(other, name))
    ]
    told = ", ".join(differ) or "all others are the same to six digits"
    return False, f"only statistics are there, golden and target: the bits differ; {told}"


def _text(number: float) -> str:
    return f"{number:.6g}"
