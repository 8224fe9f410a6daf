"""Each NPU compute kernel becomes the CPU kernel of the same ATen operator (set-up C)."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Memory and metadata operators, which work as they are over the stub libraries.
_KEPT = frozenset(
    (
        "empty.memory_format",
        "empty_strided",
        "_local_scalar_dense_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "resize_",
        "as_strided",
        "view",
        "_reshape_alias",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "is_set_to",
        "view.dtype",
        "view_as_real",
        "view_as_complex",
        "unfold",
        "alias",
        "detach",
        "t",
        "transpose.int",
        "slice.Tensor",
        "select.int",
        "expand",
        "permute",
        "unsqueeze",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "split.Tensor",
        "split_with_sizes",
        "_conj",
        "_neg_view",
    )
)

_registrations: list[torch.library.Library] = []


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_npu(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        on_host(copy).copy_(tensor)
    return copy


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return on_host(value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def _host_kernel(op: Any) -> Callable[..., Any]:
    schema = op._schema

    def kernel(*args: Any, **kwargs: Any) -> Any:
        host_args, host_kwargs = tree_map(_to_host, (args, kwargs))
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
        if schema.name == "aten::_copy_from":  # (self, dst): the one operator with two devices
            host_args[1].copy_(host_args[0])
            return args[1]
        out = op(*host_args, **host_kwargs)
        to_cpu = kwargs.get("device")
        if schema.name == "aten::_to_copy" and to_cpu is not None and to_cpu.type == "cpu":
            return out.clone()
        return _results_on_npu(schema, out, args, kwargs)

    return kernel


def _results_on_npu(schema: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in schema.arguments]
    bound = dict(zip(names, args, strict=False), **kwargs)  # the defaults are not given
    results = []
    for index, value in enumerate(out if isinstance(out, (tuple, list)) else (out,)):
        alias = schema.returns[index].alias_info if index < len(schema.returns) else None
        if alias is not None and alias.is_write:  # in-place or out=: hand back the caller's tensor
            value = next(
                bound[argument.name]
                for argument in schema.arguments
                if argument.alias_info is not None
                and argument.alias_info.before_set & alias.before_set
            )
        elif isinstance(value, torch.Tensor):
            value = _on_npu(value)
        results.append(value)
    return type(out)(results) if isinstance(out, (tuple, list)) else results[0]


def _needs_host_kernel(name: str) -> bool:
    qualified = f"aten::{name}"
    has_npu_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "PrivateUse1")
    has_cpu_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(qualified, "CPU")
    return name not in _KEPT and has_npu_kernel and (has_cpu_kernel or name == "_copy_from")


def _matmul_backward(
    grad: torch.Tensor, first: torch.Tensor, other: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`aten.matmul_backward` for two and more dimensions; the CPU has no kernel for it."""
    host_grad, host_first, host_other = on_host(grad), on_host(first), on_host(other)
    of_first = (host_grad @ host_other.mT).sum_to_size(first.shape) if mask[0] else None
    of_other = (host_first.mT @ host_grad).sum_to_size(other.shape) if mask[1] else None
    return tuple(
        None if part is None else _on_npu(part.contiguous()) for part in (of_first, of_other)
    )


def install_host_kernels() -> int:
    """Replace the kernels; returns how many. Call once, after torch_npu is imported."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    _registrations.append(library)
    names = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    ]
    replaced = [name for name in names if _needs_host_kernel(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once for each kernel that is replaced
        for name in replaced:
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, _host_kernel(op), "PrivateUse1", allow_override=True)
        library.impl("matmul_backward", _matmul_backward, "PrivateUse1", allow_override=True)
    return len(replaced) + 1
