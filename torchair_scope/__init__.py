"""torchair_scope: a microscope for compiled PyTorch graphs.

    import torchair_scope as torchair

    with torchair.scope.data_dump("mlp"):
        y = self.mlp(h)

Only the operators born in the scope are run one by one and saved as `.npy`; the rest of the
model is compiled.
"""

from torchair_scope import scope
from torchair_scope.backends import get_compiler, get_npu_backend
from torchair_scope.config import CompilerConfig
from torchair_scope.scope import dump_ops, remove_dump_ops

__all__ = [
    "CompilerConfig",
    "dump_ops",
    "get_compiler",
    "get_npu_backend",
    "remove_dump_ops",
    "scope",
]
__version__ = "0.1.0"
