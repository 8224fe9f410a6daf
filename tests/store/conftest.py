"""Both ways to do what has to be fast: the compiled functions, and those of Python."""

from __future__ import annotations

import pytest

from torchair_scope.store import compiled


@pytest.fixture(params=["compiled", "python"])
def kernels(request, monkeypatch):
    """Run a test with the functions in C, then without."""
    compiled.kernels.cache_clear()
    if request.param == "python":
        monkeypatch.setenv(compiled.VARIABLE, "0")
    assert (compiled.kernels() is None) == (request.param == "python")
    yield request.param
    compiled.kernels.cache_clear()
