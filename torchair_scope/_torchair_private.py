"""Everything of TorchAir that is private is called from this file.

TorchAir comes inside torch_npu in two packages, `torchair` and `npugraph_ex`, which share their
shape. Checked with the torch_npu 2.13.0 wheel. What is used is looked at before anything is
changed (`mismatches`); where it is not as expected, nothing is.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

CHECKED_WITH = "2.13."

_SIGNATURES = {
    "_NpuFxCompiler.__init__": ["self", "compiler_config"],
    "_NpuFxCompiler._get_compiled_gm": ["self", "gm", "example_inputs"],
    "_next_unique_graph_id": [],
}
_PARAMETER_MARKS = ("_torchair_is_parameter", "_dynamo_static_input_type")
_ENTER = "scope_enter(str[] keys, str[] values, bool need_execute=False)"


@dataclass(frozen=True)
class Package:
    """One of the two packages; a `config` is an instance of its `CompilerConfig`.

    Args:
        name: the package, which is also the namespace of its marker operators or near it.
        markers: the namespace of its marker operators in `torch.ops`.
        needed: what a config must have, as dotted paths.
    """

    name: str
    markers: str
    needed: tuple[str, ...]

    @property
    def compiler_module(self) -> str:
        """The module whose import is waited for."""
        return f"{self.name}.npu_fx_compiler"

    @property
    def _compiler(self) -> ModuleType:
        return sys.modules[self.compiler_module]

    @property
    def scope_module(self) -> ModuleType:
        """The module that holds `data_dump` and the other scopes."""
        return importlib.import_module(f"{self.name}.scope")

    def next_graph_number(self) -> int:
        """A number from the counter that also numbers the package's own graphs and dumps."""
        return int(self._compiler._next_unique_graph_id())

    @contextlib.contextmanager
    def keeping_scopes(self) -> Iterator[None]:
        """Put the thread's scopes back as they were if a conversion fails inside some."""
        depth = len(self._open_scopes())
        try:
            yield
        except BaseException:
            del self._open_scopes()[depth:]
            raise

    def _open_scopes(self) -> list[Any]:
        local = self.scope_module._scope_attr.local
        stack: list[Any] = getattr(getattr(local, "scope_attr", None), "_attribute_stack", [])
        return stack

    def mismatches(self) -> list[str]:
        """What of the installed package is not as it was when this file was checked with it."""
        return [*_wrong_version(), *self._wrong_shapes()]

    def _wrong_shapes(self) -> Iterator[str]:
        for path, expected in _SIGNATURES.items():
            function = _attribute(self._compiler, path)
            found = None if function is None else list(inspect.signature(function).parameters)
            if found != expected:
                yield f"{self.compiler_module}.{path} takes {found}, not {expected}"
        if _attribute(self.scope_module, "_scope_attr.local") is None:
            yield f"{self.name}.scope has no _scope_attr.local"
        enter = _attribute(torch.ops, f"{self.markers}.scope_enter.default")
        if enter is None or _ENTER not in str(enter._schema):
            yield f"torch.ops.{self.markers}.scope_enter is not {_ENTER}"
        config = self._compiler.CompilerConfig()
        for path in self.needed:
            if not _has(config, path):
                yield f"{self.name}.CompilerConfig has no {path}"


TORCHAIR = Package(
    "torchair",
    "air",
    (
        "mode.value",
        "debug.data_dump.type.value",
        "debug.data_dump.path",
        "debug.data_dump.filter",
        "debug.data_dump.enabled",
        "debug.graph_dump.type.value",
        "debug.fx_summary.enabled",
        "dump_config.enable_dump.value",
        "export.export_mode",
    ),
)
NPUGRAPH_EX = Package(
    "npugraph_ex",
    "npugraph_ex",
    ("mode.value", "force_eager.value", "dump_tensor_data.value", "data_dump_dir.value"),
)


def _wrong_version() -> Iterator[str]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("torch_npu")
        if not version.startswith(CHECKED_WITH):
            yield f"torch_npu is {version}, not {CHECKED_WITH}x"


def _attribute(owner: Any, path: str) -> Any:
    for step in path.split("."):
        owner = getattr(owner, step, None)
    return owner


def _has(owner: Any, path: str) -> bool:
    for step in path.split("."):
        if not hasattr(owner, step):
            return False
        owner = getattr(owner, step)
    return True


def has_own_data_dump(scope_module: ModuleType) -> bool:
    """Whether a scope module's `data_dump` is the one that this file was checked with."""
    own = getattr(scope_module, "data_dump", None)
    if own is None or list(inspect.signature(own).parameters):
        return False
    return getattr(own(), "attrs", None) == [("torchair_enable_data_dump", "True")]


# --- configs -----------------------------------------------------------------------------------


def is_on(option: Any) -> bool:
    """Whether a yes-or-no option of a config is set; its value is "1" or "0"."""
    return str(getattr(option, "value", option)) in ("1", "True")


def without_npy_dump(compiler: Any) -> Any:
    """The same `_NpuFxCompiler`, but it compiles what it gets and does not dump it whole."""
    quiet, config = copy.copy(compiler), copy.copy(compiler.config)
    if hasattr(config, "debug"):
        debug = copy.copy(config.debug)
        debug.__dict__["data_dump"] = type(config.debug.data_dump)()
        config.__dict__["debug"] = debug
    elif is_on(config.force_eager):
        option = copy.copy(config.dump_tensor_data)
        option.value = False
        config.__dict__["dump_tensor_data"] = option
    quiet.config = config
    return quiet


# --- example inputs ----------------------------------------------------------------------------


def is_marked_as_parameter(value: Any) -> bool:
    """Whether TorchAir takes an example input for one whose memory is the same at each run."""
    return any(hasattr(value, mark) for mark in _PARAMETER_MARKS)


def mark_as_parameter(value: Any) -> None:
    """Have TorchAir take an example input for one whose memory is the same at each run."""
    if isinstance(value, torch.Tensor):
        setattr(value, _PARAMETER_MARKS[0], True)


# --- the installed TorchAir --------------------------------------------------------------------


def importable() -> ModuleType | None:
    """TorchAir, where it can be imported without importing torch_npu; else None."""
    if "torchair" not in sys.modules and not _is_on_path("torchair"):
        return None
    try:
        return importlib.import_module("torchair")
    except Exception as error:
        warnings.warn(
            f"TorchAir is installed and cannot be imported ({type(error).__name__}: {error}); "
            "torchair_scope goes on with its own CompilerConfig and Inductor",
            stacklevel=3,
        )
        return None


def _is_on_path(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    # Any folder called torchair on sys.path is a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


# --- the device --------------------------------------------------------------------------------


def npu_format(tensor: torch.Tensor) -> int | None:
    """The number of an NPU tensor's internal format (2 is ND), None for tensors elsewhere."""
    if tensor.device.type != "npu":
        return None
    npu = sys.modules.get("torch_npu")
    return None if npu is None else int(npu.get_npu_format(tensor))


def is_capturing() -> bool:
    """Whether the current NPU stream is captured: then nothing may be copied to the host."""
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    asks = getattr(npu, "is_current_stream_capturing", None)
    return bool(asks()) if asks is not None else False
