"""Both ways to do what has to be fast: the compiled functions, and those of Python."""

from __future__ import annotations

import pytest

from torchair_scope.store import compiled


@pytest.fixture(params=["compiled", "python"])
def kernels(request):
    """Run a test with the functions in C, then without."""
    if request.param == "python":
        request.getfixturevalue("without_kernels")
    assert (compiled.kernels() is None) == (request.param == "python")
