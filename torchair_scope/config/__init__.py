"""What a user can set: `CompilerConfig` and the groups of options below it."""

from torchair_scope.config.compiler_config import CompilerConfig
from torchair_scope.config.debug_config import DataDump, DebugConfig, GraphDump
from torchair_scope.config.dump_config import DumpConfig

__all__ = ["CompilerConfig", "DataDump", "DebugConfig", "DumpConfig", "GraphDump"]
