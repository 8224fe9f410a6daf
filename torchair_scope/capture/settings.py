"""What a user has asked for, wherever it was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchair_scope.capture.tags import Tag
from torchair_scope.options import NONE, Options, in_force, options_with_key
from torchair_scope.store.layout import rank_and_world_size

SETTINGS = "torchair_scope_settings"  # the attribute of a backend that tells its settings

Filter = Callable[[torch.fx.Node], torch.fx.Node | None]


@dataclass(frozen=True)
class DumpSettings:
    """What one backend was told to do.

    Args:
        options: the backend's own; those of a scope come before them.
        filter: gets each node, and returns it, or None for a node that is not to be dumped.
        whole_graph: dump a graph that has no scope as a whole.
        layers: names of nodes that are dumped in a scope or not.
        graph_file: for a graph's name the file that its text is to be written to.
    """

    options: Options = NONE
    filter: Filter | None = None
    whole_graph: bool = False
    layers: frozenset[str] = frozenset()
    graph_file: Callable[[str], str] | None = None

    @classmethod
    def of(cls, config: Any, options: Options = NONE) -> DumpSettings:
        """The settings that stand in a compiler config, ours or TorchAir's, over `options`."""
        data_dump, graph_dump = config.debug.data_dump, config.debug.graph_dump
        settings = cls(
            options=Options(path=data_dump.path).over(options),
            filter=data_dump.filter,
            whole_graph=data_dump.enabled,
            graph_file=graph_dump.full_path if graph_dump.enabled else None,
        )
        # TorchAir's own dump_config turns on a dump that TorchAir makes itself.
        dump_config: Any = getattr(config, "dump_config", None)
        return dump_config.added_to(settings) if hasattr(dump_config, "added_to") else settings

    def options_of(self, tag: Tag | None) -> Options:
        """The options in force for a scope; without a tag, for what is dumped outside of any."""
        of_scope = options_with_key(tag.options) if tag else NONE
        return in_force(of_scope.over(self.options))

    def within(self, options: Options) -> DumpSettings:
        """The settings for what lies in a scope with these options."""
        return replace(self, options=options.over(self.options))


def selects_this_rank(options: Options) -> bool:
    """Whether a process with this one's rank dumps anything with these options."""
    return options.ranks is None or options.selects_rank(rank_and_world_size()[0])
