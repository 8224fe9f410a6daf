"""The numbers that say what is in a tensor; docs/statistics.md defines them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Statistics:
    """What is in a tensor. NaN and infinite values are counted, and left out of the rest.

    Values are taken as float64. Of complex numbers the parts are taken, so that `count` is twice
    the number of elements.

    Attributes:
        count: how many values there are.
        minimum: the smallest value; NaN if there is none that is finite.
        maximum: the largest one, likewise.
        mean: likewise.
        std: the root of the mean square of the distance from the mean, as `numpy.std` has it.
        norm: the root of the sum of squares.
        zeros: how many are zero.
        subnormals: how many are not zero, but less than the smallest normal number of the dtype.
        nans: how many are NaN.
        positive_infinities: how many are Inf.
        negative_infinities: how many are -Inf.
        hash: of the exact bits, 16 hexadecimal digits.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    std: float
    norm: float
    zeros: int
    subnormals: int
    nans: int
    positive_infinities: int
    negative_infinities: int
    hash: str

    @property
    def infinities(self) -> int:
        """How many values are infinite."""
        return self.positive_infinities + self.negative_infinities

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return self.nans + self.infinities


STATISTICS = tuple(field.name for field in fields(Statistics))


class Part(NamedTuple):
    """What is in a part of a tensor: sums over its finite values, then counts.

    `spread` is the sum of squares of the distance from the mean, `hashed` a share in the hash.
    """

    minimum: float = math.inf
    maximum: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    spread: float = 0.0
    finite: int = 0
    zeros: int = 0
    subnormals: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    hashed: int = 0

    def joined(self, other: Part) -> Part:
        """Both parts as one."""
        finite = self.finite + other.finite
        share = other.finite / finite if finite else 0.0
        apart = other.mean - self.mean if self.finite and other.finite else 0.0
        counts: Any = zip(self[SUMS:], other[SUMS:], strict=True)
        return Part(
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.mean + apart * share if self.finite else other.mean,
            self.squares + other.squares,
            self.spread + other.spread + apart * apart * self.finite * share,
            *(one + another for one, another in counts),
        )

    def statistics(self, count: int) -> Statistics:
        """The statistics of the whole tensor, which has `count` values."""
        mean_square = self.spread / self.finite if self.finite else math.nan
        return Statistics(
            count,
            self.minimum if self.finite else math.nan,
            self.maximum if self.finite else math.nan,
            self.mean if self.finite else math.nan,
            math.sqrt(mean_square),
            math.sqrt(self.squares),
            self.zeros,
            self.subnormals,
            self.nans,
            self.positive_infinities,
            self.negative_infinities,
            f"{self.hashed & _WORD:016x}",
        )


SUMS = 5  # the entries of a Part that are no counts
