"""Stand-ins for TorchAir's three pybind modules."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

from .ge_executor import GeExecutor
from .recorder import RECORDER

_TORCH_DATA_TYPES = (
    "BOOL UINT8 INT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 BF16 FLOAT16 FLOAT32 FLOAT64 "
    "COMPLEX32 COMPLEX64 COMPLEX128"
)


def make_module(name: str, **attributes: Any) -> types.ModuleType:
    """A module without a file, with the given attributes and the spec that importing asks for."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.__file__ = f"<simulated {name}>"
    module.__dict__.update(attributes)
    return module


def _recorded(name: str, answer: Any = None) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        RECORDER.calls.append((name, args))
        return answer

    function.__name__ = name
    return function


def _acl_mdl_set_dump(path: str) -> None:
    RECORDER.calls.append(("AclmdlSetDump", (path,)))
    RECORDER.acl_dump_configs.append(path)


def _torchair_extension() -> types.ModuleType:
    data_types = {name: number for number, name in enumerate(_TORCH_DATA_TYPES.split())}
    answers = {
        "StupidRepeat": None,
        "InitializeGraphEngine": None,
        "FinalizeGraphEngine": None,
        "InitDeviceStdoutChannel": None,
        "export": None,
        "CheckAclnnAvaliable": True,
        "GetSocName": "Ascend910B1",
        "AclopStartDumpArgs": None,
        "AclopStopDumpArgs": None,
        "SetDebugLogPath": None,
        "as_torch_tensors": (-1, []),
        "check_cann_compat": "",  # empty means compatible
        "get_registered_ir_def": ("None", [], [], []),
    }
    return make_module(
        "torchair.core._torchair",
        TorchNpuGraphBase=GeExecutor,
        TorchDataType=types.SimpleNamespace(**data_types),
        AclmdlSetDump=_acl_mdl_set_dump,
        **{name: _recorded(name, answer) for name, answer in answers.items()},
    )


def install_extensions() -> None:
    """Put the stand-ins where TorchAir's imports find them. Call before TorchAir is imported."""
    sys.modules["torchair.core._torchair"] = _torchair_extension()
    sys.modules["torchair.core._npu_graph_executor"] = make_module(
        "torchair.core._npu_graph_executor", GetNpuStorageSizes=lambda tensor: list(tensor.shape)
    )
    sys.modules["torchair.core._npu_utils"] = make_module("torchair.core._npu_utils")
