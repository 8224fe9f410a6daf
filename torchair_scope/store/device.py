"""Values on their way from a device to the host: the model's thread does not wait for them."""

from __future__ import annotations

from typing import Any

import torch


class Arrival:
    """The end of a copy from a device; until then it keeps what is copied."""

    def __init__(self, event: Any, copied: torch.Tensor) -> None:
        self._event = event
        self._copied: torch.Tensor | None = copied

    def wait(self) -> None:
        """Wait until the copy has arrived; for the thread that reads it."""
        self._event.synchronize()
        self._copied = None


def host_copy(tensor: torch.Tensor, *, beside: bool) -> tuple[torch.Tensor, Arrival]:
    """Start to copy a device's tensor to pinned host memory; the copy has the value of now.

    Args:
        tensor: on a device.
        beside: whether the copy runs on a stream of its own, beside what the device is given
            next. `wait_for_copies` then has to come before what writes to the tensor.
    """
    module = torch.get_device_module(tensor.device)
    current = module.current_stream(tensor.device)
    stream = _stream_for_copies(tensor.device) if beside else current
    with torch.no_grad(), module.stream(stream):
        stream.wait_stream(current)
        # Named, since the user's code may run where another device is the default.
        host = torch.device("cpu")
        copy = torch.empty_strided(
            tensor.shape, _dense_strides(tensor), dtype=tensor.dtype, device=host, pin_memory=True
        )
        copy.copy_(tensor, non_blocking=True)
        event = module.Event()
        event.record(stream)
    return copy, Arrival(event, tensor)


def wait_for_copies(device: torch.device) -> None:
    """Have what a device is given next run after all copies; the host does not wait."""
    if device in _streams:
        torch.get_device_module(device).current_stream(device).wait_stream(_streams[device])


_streams: dict[torch.device, Any] = {}


def _stream_for_copies(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.get_device_module(device).Stream(device)
    return _streams[device]


def _dense_strides(tensor: torch.Tensor) -> list[int]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
