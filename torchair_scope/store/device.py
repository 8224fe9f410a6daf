"""Values on their way from a device to the host: copies are issued at once, and waited for once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

MAX_BYTES_UNDER_WAY = 1 << 28


def host_copy(tensor: Any) -> torch.Tensor | None:
    """A copy of a device tensor that is under way to pinned host memory; None if there is none.

    The copy is ordered on the device's current stream: it has the value of now, whatever is done
    to the tensor later. Before it is read, the device has to be waited for.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_cpu or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    with torch.no_grad():
        # Named, since the user's code may run where another device is the default.
        host = torch.device("cpu")
        copy = torch.empty_strided(
            tensor.shape, _dense_strides(tensor), dtype=tensor.dtype, device=host, pin_memory=True
        )
        return copy.copy_(tensor.detach(), non_blocking=True)


def _dense_strides(tensor: torch.Tensor) -> list[int]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


class Transfers:
    """What a step has to do once its copies have arrived, in the order in which it was asked for.

    While no copy is under way, everything is done at once.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self._devices: set[torch.device] = set()
        self._bytes = 0
        self._lock = threading.RLock()

    def start(self, tensor: Any) -> torch.Tensor | None:
        """Start to copy a device tensor to the host; None if it is none."""
        copy = host_copy(tensor)
        if copy is not None:
            with self._lock:
                self._devices.add(tensor.device)
                self._bytes += copy.nbytes
        return copy

    def then(self, action: Callable[[], None]) -> None:
        """Do something that reads the copies started so far."""
        with self._lock:
            if self._devices:
                self._actions.append(action)
            else:
                action()
            if self._bytes > MAX_BYTES_UNDER_WAY:
                self.wait()

    def wait(self) -> None:
        """Wait for the devices, once, and do what was put off."""
        with self._lock:
            actions, self._actions = self._actions, []
            devices, self._devices = self._devices, set()
            self._bytes = 0
            for device in devices:
                torch.get_device_module(device).synchronize(device)
            for action in actions:
                action()
