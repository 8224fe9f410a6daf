"""TorchAir's `config.dump_config`, as far as its options mean something here."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torchair_scope.config.options import Checked, OptionGroup
from torchair_scope.numbers import numbers
from torchair_scope.options import Data, Options

_DATA: dict[Any, Data] = {"tensor": "tensors", "stats": "stats"}
_LAYERS = r'^[0-9a-zA-Z_" "/\\.]*$'
_Settings = TypeVar("_Settings", bound=Any)


def _one_of(legal: tuple[Any, ...], value: Any) -> Any:
    if value not in legal:
        raise ValueError(
            f"Value {value!r} (type: {type(value)}) not in optional list {list(legal)} "
            f"(type: {type(legal[0])})."
        )
    return value


def _matches(regex: str, example: str, value: Any) -> Any:
    if not isinstance(value, str) or not re.match(regex, value):
        raise ValueError(
            f"Please set legal regex value format match {regex}, {value} is Illegal format, "
            f"correct example:{example}."
        )
    return value


def _steps(value: Any) -> Any:
    _matches(r"^(((\d+)|(\d+-{0,1}\d+))\|{0,1})*$", "0|1|2-5|6", value)
    numbers(value, "dump_step")
    return value


def _existing_folder(value: Any) -> str:
    if value is None or not os.path.isdir(value):
        raise FileNotFoundError(
            f"Please set legal dir path, {value} is not found or is not a file directory!"
        )
    return str(os.fspath(value))


class DumpConfig(OptionGroup):
    """`config.dump_config`: TorchAir's options of a dump, for scopes and named nodes.

    Example:
        >>> from torchair_scope.config import CompilerConfig
        >>> config = CompilerConfig()
        >>> config.dump_config.enable_dump = True
        >>> config.dump_config.dump_step = "0|2-5"
        >>> config.dump_config.dump_layer = "mm_1 softmax"

    Options:
        enable_dump: whether the options below are in force. A graph without a scope is then dumped
            whole, unless there is a `dump_layer`.
        dump_path: an existing folder; `config.debug.data_dump.path` comes before it.
        dump_mode: "all", "input" or "output"; the option `mode` of a scope.
        dump_step: as "0|3-5|10"; the option `steps` of a scope.
        dump_data: "tensor" or "stats"; the option `data` of a scope, "tensors" or "stats".
        dump_layer: names of nodes of the ATen graph, with spaces between them, which are dumped
            besides those in scopes. `config.debug.graph_dump` writes the graph with its names.
    """

    enable_dump = Checked(False, partial(_one_of, (False, True)))
    dump_path = Checked("./", _existing_folder)
    dump_mode = Checked("all", partial(_one_of, ("input", "output", "all")))
    dump_step = Checked("", _steps)
    dump_data = Checked("tensor", partial(_one_of, ("tensor", "stats")))
    dump_layer = Checked("", partial(_matches, _LAYERS, "Mul_1 Add1 Conv2D_1"))

    def added_to(self, settings: _Settings) -> _Settings:
        """A backend's `DumpSettings` with what this group asks for."""
        if not self.enable_dump:
            return settings
        own = Options(
            mode=self.dump_mode.given,
            steps=numbers(self.dump_step.given, "dump_step") if self.dump_step.given else None,
            data=_DATA.get(self.dump_data.given),
            path=os.path.realpath(self.dump_path.given) if self.dump_path.given else None,
        )
        layers = frozenset((self.dump_layer.value or "").split())
        return replace(
            settings,
            options=settings.options.over(own),
            layers=layers,
            whole_graph=settings.whole_graph or not layers,
        )
