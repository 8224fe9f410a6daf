"""The arguments and results of a call as torch objects, as dumped or in a higher precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair_scope.analysis.dump import Call
from torchair_scope.analysis.operators import NotReplayableError
from torchair_scope.analysis.tensors import MissingTensorError
from torchair_scope.store.manifest import decode

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Device = str | torch.device

# Their third argument says that a half is to become a float, which only a half can.
_HALF_TO_FLOAT = ("aten._softmax.default", "aten._log_softmax.default")
_WIDE = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def load_arguments(call: Call, device: Device = "cpu") -> Arguments:
    """The arguments as the operator got them, on a device.

    **Raises:** `NotReplayableError` if a tensor is not on disk.
    """
    record = call.record or {}
    if "args" not in record or "kwargs" not in record:
        raise NotReplayableError("its arguments are not in its record")

    def load(description: dict[str, Any]) -> torch.Tensor:
        if "sample" in description:
            raise NotReplayableError(
                f"{description['slot']} is sampled: only {description['sample']} of it was saved"
            )
        return call.tensors[description["slot"]].torch(device)

    try:
        args = decode({"tuple": record["args"]}, load, device)
        return args, {name: decode(tree, load, device) for name, tree in record["kwargs"].items()}
    except (MissingTensorError, KeyError) as error:
        raise NotReplayableError(f"an argument is missing: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise NotReplayableError(f"an argument cannot be made here: {error}") from error


def in_precision(arguments: Arguments, dtype: torch.dtype, target: str) -> Arguments:
    """The arguments of an operator with each float in `dtype`; integers and quantised ones stay."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_quantized else value.to(_precise(value.dtype, dtype))
        return _precise(value, dtype) if isinstance(value, torch.dtype) else value

    converted: Arguments = map_leaves(arguments, convert)
    if target in _HALF_TO_FLOAT:
        (value, dim, *_), kwargs = converted
        return (value, dim, False), kwargs
    return converted


def _precise(given: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    if given.is_floating_point:
        return wanted
    return _WIDE.get(wanted, given) if given.is_complex else given


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Change every leaf of an argument tree."""
    if isinstance(tree, dict):
        return {key: map_leaves(member, change) for key, member in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        members = [map_leaves(member, change) for member in tree]
        return members if isinstance(tree, list) else tuple(members)
    return change(tree)


def by_slot(result: Any) -> dict[str, torch.Tensor]:
    """The tensors that an operator returned, by the slots that they are saved under."""
    found: dict[str, torch.Tensor] = {}

    def visit(value: Any, slot: str) -> None:
        if isinstance(value, torch.Tensor):
            found[slot] = value
        elif isinstance(value, list | tuple | dict):
            members = value.values() if isinstance(value, dict) else value
            for position, member in enumerate(members):
                visit(member, f"{slot}.{position}")

    visit(result, "OUTPUT" if isinstance(result, list | tuple) else "OUTPUT.0")
    return found
