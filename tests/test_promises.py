"""What is promised of every program: its result, what is on disk, and what can be re-run."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import HealthCheck, assume, given, settings

from tests.support.account import assert_adds_up, rows
from tests.support.bits import difference
from tests.support.random_programs import PLAIN, Program, programs
from tests.support.replay import assert_replays
from torchair_scope.capture.account import account
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import Dump, read

EXPECTED = ("removed as dead code", "runs uncompiled although")

# The same programs in every run: a fault of theirs is that of the change that is tested.
always_the_same = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@given(programs())
@settings(always_the_same, max_examples=40)
def test_with_aot_eager_the_bits_are_those_without_scopes_and_every_call_replays(program):
    check(program, "aot_eager")


@pytest.mark.slow
@given(programs(dtypes=PLAIN))
@settings(always_the_same, max_examples=8)
def test_with_inductor_the_result_is_that_without_scopes_and_every_call_replays(program):
    check(program, "inductor")


def check(program: Program, inner: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        account.forget()
        expected = run_without_scopes(program, inner)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"path": folder, "backend": inner}
            actual = run(program, data_dump, backend="torchair_scope", options=options)
        if inner == "aot_eager":
            assert difference(actual, expected) is None
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        check_dump(Path(folder))
        check_account(Path(folder))
        said = {str(warning.message) for warning in caught}
    unexpected = [text for text in said if not any(part in text for part in EXPECTED)]
    assert not unexpected
    assert program.breaks or not any("runs uncompiled" in text for text in said)


def check_dump(folder: Path) -> None:
    """A program of which all scopes are dead code leaves none."""
    if not any(folder.iterdir()):
        return
    dump = read(folder)
    assert dump.problems == []
    assert_replays(dump)


def check_account(folder: Path) -> None:
    """Each operator of each scope is dumped, or its reason is known; so is each call."""
    dump = read(folder) if any(folder.iterdir()) else Dump(folder, [])
    assert_adds_up(rows(), dump)


def run_without_scopes(program: Program, inner: str) -> list[torch.Tensor]:
    """A program that the inner compiler cannot take is no example."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(program, lambda *name: contextlib.nullcontext(), backend=inner)
    except Exception:
        assume(False)
        raise


def run(program: Program, scope: Callable, **backend: Any) -> list[torch.Tensor]:
    """All that a program computes: its results, what it wrote to its inputs, its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, requires_grad=program.trains) for _ in range(2)]
    function = torch.compile(
        program.function(scope),
        fullgraph=not program.breaks,
        dynamic=program.dynamic or None,
        **backend,
    )
    with torch._inductor.config.patch(fallback_random=True):
        results = function(*inputs)
        if program.trains:
            sum(result.double().sum() for result in results).backward()
    gradients = [x.grad for x in inputs if x.grad is not None]
    return [value.detach() for value in (*results, *inputs, *gradients)]
