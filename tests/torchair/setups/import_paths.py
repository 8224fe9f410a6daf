"""Make TorchAir's packages importable from an installed torch_npu that is not imported itself."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

_PACKAGES = ("torchair", "npugraph_ex")


class _TorchairFinder:
    """Finds the two packages, so that nothing else of `torch_npu/dynamo` gets on `sys.path`."""

    def __init__(self, dynamo_folder: str) -> None:
        self._folder = dynamo_folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PACKAGES:
            return None
        folder = os.path.join(self._folder, name)
        return importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


class _TorchNpuBlocker:
    """Keeps `import torch_npu` away from the installed package, which cannot load without CANN."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch_npu":
            raise ModuleNotFoundError(f"No module named {name!r} (this set-up hides it)", name=name)


def expose_torchair_without_torch_npu() -> None:
    """Put the finders in front. Raises RuntimeError where torch_npu is not installed."""
    spec = importlib.util.find_spec("torch_npu")  # finds it, does not import it
    if spec is None or spec.origin is None:
        raise RuntimeError("torch_npu is not installed here: run tests/torchair/prepare.py")
    dynamo_folder = os.path.join(os.path.dirname(spec.origin), "dynamo")
    sys.meta_path[:0] = [_TorchairFinder(dynamo_folder), _TorchNpuBlocker()]
