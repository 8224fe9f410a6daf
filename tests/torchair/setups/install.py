"""Install one of the three set-ups in this process.

from tests.torchair.setups.install import install
setup = install("C", stub_folder=".venv-torchair/cann-stubs")
setup.torchair, setup.device, setup.modes
"""

from __future__ import annotations

import ctypes
import dataclasses
import glob
import os
import sys
from typing import Any

import torch

from . import ge_executor
from .acl_graph import TapedGraph, capture_into
from .extensions import install_extensions
from .hand_made_torch_npu import install_hand_made_torch_npu
from .host_kernels import install_host_kernels
from .import_paths import expose_torchair_without_torch_npu
from .recorder import RECORDER

MODES = {
    "A": ("max-autotune",),
    "B": ("max-autotune", "reduce-overhead", "npugraph_ex"),
    "C": ("max-autotune", "reduce-overhead", "npugraph_ex"),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """An installed set-up.

    Attributes:
        name: `"A"`, `"B"` or `"C"`.
        torchair: the real TorchAir module.
        device: the device that models and inputs belong on, `"cpu"` or `"npu"`.
        modes: the values of `CompilerConfig.mode` that work here.
    """

    name: str
    torchair: Any
    device: str
    modes: tuple[str, ...]

    def compiler_config(self, mode: str) -> Any:
        """A fresh `torchair.CompilerConfig` for `mode` that this set-up can carry out."""
        config = self.torchair.CompilerConfig()
        config.mode = mode
        if self.name == "B":  # the fused patterns need operators of the real torch_npu
            config.experimental_config.pattern_fusion_pass = False
        return config


CURRENT: Setup | None = None  # what `install` has installed in this process


def install(name: str, stub_folder: str | None = None) -> Setup:
    """Install a set-up. Once in a process, and before anything imports torch_npu or TorchAir.

    Args:
        name: `"A"`, `"B"` or `"C"`.
        stub_folder: for set-up C, the folder that `stub_libraries.build` filled.
    Raises:
        ValueError: for another name, or for set-up C without its folder.
        RuntimeError: where torch_npu or TorchAir is imported already.
    """
    if name not in MODES:
        raise ValueError(f"no set-up {name!r}; there are {sorted(MODES)}")
    early = [module for module in ("torch_npu", "torchair") if module in sys.modules]
    if early:
        raise RuntimeError(f"{early} was imported before the set-up; install the set-up first")
    install_extensions()
    if name == "C":
        if stub_folder is None:
            raise ValueError("set-up C needs stub_folder, see tests/torchair/prepare.py")
        torchair = _import_over_stubs(stub_folder)
    else:
        torchair = _import_without_torch_npu(hand_made=name == "B")
    ge_executor.watch_concrete_graphs()
    global CURRENT
    CURRENT = Setup(name, torchair, "npu" if name == "C" else "cpu", MODES[name])
    return CURRENT


def _import_without_torch_npu(hand_made: bool) -> Any:
    expose_torchair_without_torch_npu()
    # torch_npu adds this property, TorchAir reads it on every input. True makes aclgraph give each
    # input a buffer of its own, as it does for tensors on a device.
    torch.Tensor.is_npu = property(lambda tensor: hand_made)
    if hand_made:
        install_hand_made_torch_npu()
    import torchair
    import torchair._ge_concrete_graph.ge_converter.custom  # warns of each missing npu operator

    return torchair


def _import_over_stubs(stub_folder: str) -> Any:
    libraries = sorted(glob.glob(os.path.join(stub_folder, "*.so")))
    if not libraries:
        raise ValueError(f"no stub libraries in {stub_folder}: run tests/torchair/prepare.py")
    # Every other stub needs this one. A later request for the name of a loaded library finds it.
    libraries.sort(key=lambda path: os.path.basename(path) != "libcann_stub.so")
    for library in libraries:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch_npu

    install_host_kernels()
    torch_npu.npu.NPUGraph, torch_npu.npu.graph = TapedGraph, capture_into
    torch_npu.npu.is_current_stream_capturing = lambda: RECORDER.capturing
    torch_npu._C._npu_getCheckpointState = lambda device, pool: "mem"
    torch_npu._C._npu_setCheckpointPoolState = lambda *args: None
    import torchair

    assert torchair.CompilerConfig  # the first attribute wakes the lazy module up
    return torchair


def reset() -> None:
    """Between tests: forget the records, Dynamo's caches and TorchAir's process-wide state."""
    RECORDER.clear()
    torch._dynamo.reset()
    from torchair._ge_concrete_graph import fx2ge_converter
    from torchair.core import _backend
    from torchair.scope import _scope_attr

    _backend._GLOBAL_COMPILE_OPTION = None
    if hasattr(fx2ge_converter, "g_cached_dump_root"):
        fx2ge_converter.g_cached_dump_root = None
    _scope_attr.local.__dict__.clear()
