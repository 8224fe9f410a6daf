"""torchair_scope: a microscope for compiled PyTorch graphs.

    import torchair_scope as torchair

    with torchair.scope.data_dump("mlp"):
        y = self.mlp(h)

Only the operators born in the scope are run one by one and saved as `.npy`; the rest of the
model is compiled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchair_scope import _torchair_private, scope
from torchair_scope.backends import patching
from torchair_scope.backends.patching import unpatch
from torchair_scope.scope import dump_ops, remove_dump_ops

if TYPE_CHECKING:
    from torchair_scope.analysis.compare import compare
    from torchair_scope.analysis.load import load
    from torchair_scope.analysis.replay import replay
    from torchair_scope.backends import get_compiler, get_npu_backend
    from torchair_scope.bisection.bisect import bisect
    from torchair_scope.config import CompilerConfig

__all__ = [
    "CompilerConfig",
    "bisect",
    "compare",
    "dump_ops",
    "get_compiler",
    "get_npu_backend",
    "load",
    "remove_dump_ops",
    "replay",
    "scope",
    "unpatch",
]
__version__ = "0.1.0"

_ON_DEMAND = {
    "bisect": "bisection.bisect",
    "compare": "analysis.compare",
    "load": "analysis.load",
    "replay": "analysis.replay",
}
_TORCHAIRS_OWN = ("CompilerConfig", "get_compiler", "get_npu_backend")


def __getattr__(name: str) -> Any:
    """What is imported when asked for; `_TORCHAIRS_OWN` are TorchAir's where it can be imported."""
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f"torchair_scope.{_ON_DEMAND[name]}"), name)
    if name not in _TORCHAIRS_OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchair_scope import backends, config

    torchair = _torchair_private.importable()
    ours = config if name == "CompilerConfig" else backends
    return getattr(ours if torchair is None else torchair, name)


patching.patch()
