"""A `torch_npu` written by hand, with what TorchAir uses of it, on CPU tensors (set-up B)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .acl_graph import TapedGraph, capture_into
from .extensions import make_module
from .recorder import RECORDER


class Stream:
    """A stream in name only: everything runs in program order."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.stream_id = next(Stream._numbers)
        self.priority, self.device = priority, device

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        pass


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def reset(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


_streams = [Stream()]


@contextlib.contextmanager
def _current(stream: Any = None) -> Iterator[None]:
    _streams.append(stream or _streams[-1])
    try:
        yield
    finally:
        _streams.pop()


def _storage_at(pointer: int, device: Any, nbytes: int) -> torch.UntypedStorage:
    if not nbytes:
        return torch.UntypedStorage(0)
    with _disable_current_modes():
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor_on(meta: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
    with _disable_current_modes():  # not part of what a capture records
        empty = torch.empty(0, dtype=meta["dtype"])
        return empty.set_(storage, meta["storage_offset"], meta["size"], meta["stride"])


def _in_module(module: str, **functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Name the functions as torch_npu's own: TorchAir finds their calls in code by these names."""
    for name, function in functions.items():
        function.__module__, function.__name__, function.__qualname__ = module, name, name
    return functions


_TRACED = _in_module(
    "torch_npu.npu.utils", current_stream=lambda device=None: _streams[-1]
) | _in_module(
    "torch_npu.npu.npu_config",
    get_stream_limit=lambda stream: {"cube_core_num": 24, "vector_core_num": 48},
    set_stream_limit=lambda *args: None,
)


def _npu_module(utils: types.ModuleType, streams: types.ModuleType) -> types.ModuleType:
    pools = itertools.count(1)
    npu = make_module(
        "torch_npu.npu",
        utils=utils,
        streams=streams,
        Stream=Stream,
        Event=Event,
        ExternalEvent=Event,
        NPUGraph=TapedGraph,
        graph=capture_into,
        stream=_current,
        default_stream=lambda device=None: _streams[0],
        set_stream=lambda stream: None,
        is_current_stream_capturing=lambda: RECORDER.capturing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_device_name=lambda device=None: "Ascend910B1",
        synchronize=lambda *args: None,
        empty_cache=lambda: None,
        memory_snapshot=lambda: [],
        graph_pool_handle=lambda: (next(pools), 0),
        **_TRACED,
        matmul=types.SimpleNamespace(allow_hf32=False),
        conv=types.SimpleNamespace(allow_hf32=True),
        _get_deterministic_level=lambda: 0,
        _aclnn_reselect_static_kernel=lambda: None,
        amp=types.SimpleNamespace(
            autocast_mode=types.SimpleNamespace(autocast=contextlib.nullcontext)
        ),
    )
    npu.__path__ = []
    return npu


def install_hand_made_torch_npu() -> None:
    """Make `import torch_npu` and `torch.npu` give the hand-made one."""
    extension = make_module(
        "torch_npu._C",
        _npu_getCheckpointState=lambda device, pool: "mem",
        _npu_setCheckpointPoolState=lambda *args: None,
        _construct_storage_from_data_pointer=_storage_at,
        _construct_NPU_Tensor_From_Storage_And_Metadata=_tensor_on,
        _aclop_start_dump=lambda *args: None,
        _aclop_stop_dump=lambda *args: None,
    )
    utils = make_module(
        "torch_npu.npu.utils",
        _is_gte_cann_version=lambda version, module="CANN": True,
        get_cann_version=lambda module="CANN": "9.2.0",
    )
    streams = make_module(
        "torch_npu.npu.streams", Stream=Stream, Event=Event, ExternalStream=Stream
    )
    npu = _npu_module(utils, streams)
    package = make_module(
        "torch_npu",
        npu=npu,
        _C=extension,
        get_npu_format=lambda tensor: 2,
        get_storage_size=lambda tensor: tensor.numel(),
        __version__="2.13.0+hand.made",
    )
    package.__path__ = []  # a package without files, so that other submodules are reported missing
    modules = (package, npu, extension, utils, streams)
    sys.modules.update({module.__name__: module for module in modules})
    torch.npu = npu
