"""Each case runs once for each inner compiler and once without; all tests look at the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.cases import load
from tests.support.running import CaseResult, run_case, run_golden


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CaseResult]:
    """`ran(name, inner)` is the result of running the case called `name`.

    `inner` is an inner compiler, or "golden" for a run without one; a third argument is the engine.
    """

    @functools.cache
    def run(name: str, inner: str, engine: str = "interpret") -> CaseResult:
        if inner == "golden":
            return run_golden(load(name), tmp_path_factory.mktemp(name))
        options = {"backend": inner, "engine": engine}
        return run_case(load(name), options, tmp_path_factory.mktemp(name))

    return run
