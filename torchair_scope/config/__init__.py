"""What a user can set: `CompilerConfig` and the groups of options below it."""

from torchair_scope.config.compiler_config import CompilerConfig
from torchair_scope.config.debug_config import DataDump, DebugConfig, GraphDump

__all__ = ["CompilerConfig", "DataDump", "DebugConfig", "GraphDump"]
