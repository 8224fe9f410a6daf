"""What is checked of a run of a case, whichever engine has dumped it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from tests.support.bits import difference
from tests.support.running import CaseResult


def assert_same_result(run: CaseResult, inner: str) -> None:
    """Bit for bit that of the inner backend alone; with Inductor to rounding."""
    for fact in ("values", "gradients", "state"):
        actual, expected = getattr(run.result, fact), getattr(run.reference, fact)
        if inner == "inductor":
            torch.testing.assert_close(plain(actual), plain(expected), equal_nan=True)
        else:
            assert difference(plain(actual), plain(expected)) is None, fact


def assert_asked_targets(case: ModuleType, targets: Mapping[str, int]) -> None:
    """The targets that the case must have are there, and none that it must not have."""
    for part in case.MUST:
        assert count(targets, part), f"no {part} among {dict(targets)}"
    for part in getattr(case, "MUST_NOT", []):
        assert not count(targets, part), f"{part} among {dict(targets)}"


def targets_of(run: CaseResult) -> Counter[str]:
    """How many calls there are of each target."""
    return Counter(call.target for call in run.calls)


def count(targets: Mapping[str, int], part: str) -> int:
    """How many calls have a target with this in it."""
    return sum(number for target, number in targets.items() if part in target)


def plain(values: Any) -> dict[Any, torch.Tensor]:
    """Local shards for DTensors, no `requires_grad`, no None."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {
        key: (value.to_local() if hasattr(value, "to_local") else value).detach()
        for key, value in pairs
        if value is not None
    }
