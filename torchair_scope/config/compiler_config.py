"""The configuration that a user makes and hands to `get_npu_backend`."""

from __future__ import annotations

from torchair_scope.config.debug_config import DebugConfig
from torchair_scope.config.dump_config import DumpConfig
from torchair_scope.config.options import OptionGroup, SubGroup


class CompilerConfig(OptionGroup):
    """Configuration of a backend, with the names and the errors of TorchAir's `CompilerConfig`.

    Example:
        >>> import torchair_scope as torchair
        >>> config = torchair.CompilerConfig()
        >>> config.debug.data_dump.path = "./dump"
        >>> backend = torchair.get_npu_backend(compiler_config=config)

    Options:
        debug: what to dump, see `torchair_scope.config.DebugConfig`.
        dump_config: TorchAir's options of a dump, see `torchair_scope.config.DumpConfig`.

    Raises:
        ValueError: on an unknown option or an illegal value, naming those that exist.
        TypeError: on a `filter` that is not callable, or a `path` that is not a path.
    """

    debug = SubGroup(DebugConfig)
    dump_config = SubGroup(DumpConfig)
