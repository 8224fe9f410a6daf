"""Any tensor as a NumPy array that every reader can load, and back with its true facts."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchair_scope import _torch_private, _torchair_private
from torchair_scope.store.stand_in import stands_for

Array = npt.NDArray[Any]
Description = dict[str, Any]


class UnsavableTensorError(Exception):
    """A tensor has no value that could be written; the text says why."""


def to_numpy(tensor: torch.Tensor) -> Array:
    """Give the value of a tensor of any dtype, layout and device as an array.

        >>> import torch
        >>> from torchair_scope.store.arrays import to_numpy
        >>> to_numpy(torch.ones(2, dtype=torch.bfloat16))
        array([1., 1.], dtype=float32)

    | tensor | array |
    |---|---|
    | bfloat16, float8 of any kind | float32, exact |
    | float4_e2m1fn_x2 `[..., n]` | float32 `[..., 2n]`, the low half of each byte first |
    | complex32 | complex64, exact |
    | int1 … int7, uint1 … uint7, bits8 | int8, uint8: the byte that holds the value |
    | quantised, sparse, MKL-DNN | the dense value |
    | conj and neg views | resolved |
    | DTensor | the local shard |

    The array may share memory with the tensor.

    **Raises:** `UnsavableTensorError` for fake, functional, meta, batched and nested tensors and
    for subclasses that keep their data elsewhere.
    """
    if _is_ordinary(tensor) and tensor.dtype in _COMMON:
        return _converted(tensor.detach() if tensor.requires_grad else tensor)
    with torch.no_grad(), named_as_unsavable(tensor):
        return _value(plain_tensor(tensor))


@contextlib.contextmanager
def named_as_unsavable(tensor: torch.Tensor) -> Iterator[None]:
    """Make an `UnsavableTensorError` of every error in reading a tensor."""
    try:
        yield
    except UnsavableTensorError:
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise UnsavableTensorError(f"{_kind(tensor)}: {type(error).__name__}: {text}") from error


def describe(tensor: torch.Tensor) -> Description:
    """Give what the array of a tensor cannot say, as JSON; `to_tensor` reads it.

    `dtype`, `shape`, `stride`, `storage_offset` and `device` always; the rest where it is not the
    default. Of a DTensor it is the local shard's, with `mesh` and `placements` beside it.
    """
    original = stands_for(tensor)
    if original is not None:
        return dict(original.description)
    if _is_ordinary(tensor):
        return _described(tensor)
    description: Description = {}
    if _is_dtensor(tensor):
        description["dtensor"] = _dtensor_facts(tensor)
        with torch.no_grad():
            tensor = cast(Any, tensor).to_local()
    for name, fact in _FACTS.items():
        try:
            value = fact(tensor)
        except Exception:
            continue  # not every kind of tensor has every fact: a sparse one has no stride
        if value is not None and value is not False:
            description[name] = value
    return description


def to_tensor(
    array: Array, description: Description, device: str | torch.device | None = None
) -> torch.Tensor:
    """Give back the tensor that `to_numpy` and `describe` were called on.

    dtype, shape, strides and storage offset are the true ones; the device is the recorded one
    unless `device` says otherwise. Conj and neg views, DTensors and other subclasses come back as
    plain tensors, and no tensor requires a gradient.
    """
    target = torch.device(device if device is not None else description.get("device", "cpu"))
    dtype: torch.dtype = getattr(torch, description["dtype"].removeprefix("torch."))
    with torch.no_grad(), warnings.catch_warnings():
        # Sparse and quantised tensors announce that they are in beta, or on their way out.
        warnings.simplefilter("ignore", UserWarning)
        if "quantizer" in description:
            return _quantised(array, description["quantizer"], dtype).to(target)
        if "sparse" in description:
            return _sparse(_strided(array, {}, dtype), description).to(target)
        return _strided(array, description, dtype, target)


def number_array(value: Any) -> Array | None:
    """Give a number, or a list or tuple of numbers, as the 0-d or 1-d array that TorchAir saves.

    None if it is something else, or too large for an array of numbers.
    """
    if not _is_number_tree(value):
        return None
    try:
        array = np.array(_resolved(value))
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "biufc" else None


def _is_number_tree(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_number_tree(member) for member in value)
    return isinstance(
        value, bool | int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _resolved(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_resolved(member) for member in value]
    for symbolic, number in SYMBOLIC.items():
        if isinstance(value, symbolic):
            return number(value)
    return value


SYMBOLIC: dict[type, Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}


# From a tensor to an array


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Look through subclasses for the tensor that holds the data; apart from autograd.

    **Raises:** `UnsavableTensorError` if there is none.
    """
    tensor = data_tensor(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def data_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Look through subclasses for the tensor that holds the data.

    **Raises:** `UnsavableTensorError` if there is none.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = _data_of_subclass(tensor)
    if tensor.is_nested:
        raise UnsavableTensorError("a nested tensor has no single array")
    if tensor.is_meta:
        raise UnsavableTensorError("a tensor on the meta device has no data")
    return tensor


def _data_of_subclass(tensor: torch.Tensor) -> torch.Tensor:
    if _is_dtensor(tensor):
        tensor = cast(Any, tensor).to_local()
    names = [kind.__name__ for kind in type(tensor).__mro__]
    if "FakeTensor" in names:
        raise UnsavableTensorError("a FakeTensor has no data")
    if "AsyncCollectiveTensor" in names:
        tensor = cast(Any, tensor).wait()
    if tensor.is_nested or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    return tensor.as_subclass(torch.Tensor)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory is its elements, and no more is to be known of it."""
    return _is_ordinary(tensor) or (
        not tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor that is not quantised as a plain strided one, where it is.

    **Raises:** `UnsavableTensorError` for one that has no data.
    """
    if tensor.layout is not torch.strided:
        return strided(_dense(tensor))
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.untyped_storage().data_ptr():
        raise UnsavableTensorError(f"{_kind(tensor)} has no data of its own")
    return tensor


def _value(tensor: torch.Tensor) -> Array:
    if tensor.is_quantized:
        return dequantised(tensor.cpu())
    tensor = strided(tensor).cpu()
    if tensor.is_conj():
        return np.conj(_value(tensor.conj()))
    if tensor.is_neg():
        return _value(tensor.resolve_neg())
    return _converted(tensor)


def _converted(tensor: torch.Tensor) -> Array:
    convert = _CONVERSIONS.get(str(tensor.dtype))
    return tensor.numpy() if convert is None else convert(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if str(tensor.dtype).startswith("torch.float8"):
        tensor = tensor.to(torch.float32)  # float8 has no sparse kernels
    return tensor.to_dense()


def dequantised(tensor: torch.Tensor) -> Array:
    """Give the values of a quantised tensor on a CPU."""
    if tensor.dtype is not torch.qint32 or tensor.qscheme() is not torch.per_tensor_affine:
        return tensor.dequantize().numpy()
    whole: Array = tensor.int_repr().numpy().astype(np.float64)  # float32 cannot hold every qint32
    return np.asarray((whole - tensor.q_zero_point()) * tensor.q_scale())


def _from_bfloat16(tensor: torch.Tensor) -> Array:
    if tensor.numel() > _FEW:
        return tensor.to(torch.float32).numpy()
    bits = tensor.view(torch.int16).numpy().astype(np.uint32)  # Operators of torch start slowly.
    bits <<= 16
    return bits.view(np.float32)


def _from_complex32(tensor: torch.Tensor) -> Array:
    halves = torch.view_as_real(tensor).numpy().astype(np.float32, order="C")
    return np.asarray(halves.view(np.complex64)[..., 0])


def _from_float8(tensor: torch.Tensor) -> Array:
    return np.asarray(_float8_values(tensor.dtype)[tensor.view(torch.uint8).numpy()])


def _from_float4_pairs(tensor: torch.Tensor) -> Array:
    packed = tensor.view(torch.uint8).numpy()
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    *outer, last = packed.shape or (1,)
    return np.asarray(FLOAT4_VALUES[pairs.reshape(*outer, 2 * last)])


def _from_bytes(tensor: torch.Tensor) -> Array:
    signed = str(tensor.dtype).startswith("torch.int")
    return tensor.view(torch.int8 if signed else torch.uint8).numpy()


def _from_bits16(tensor: torch.Tensor) -> Array:
    return tensor.view(torch.uint16).numpy()


@functools.cache
def _float8_values(dtype: torch.dtype) -> Array:
    """The float32 value of each of the 256 bytes; each NaN carries its byte, to be told apart."""
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    values: Array = every_byte.view(dtype).to(torch.float32).numpy()
    nan = np.isnan(values)
    values.view(np.uint32)[nan] |= every_byte.numpy()[nan]
    return values


_FEW = 1 << 12
FLOAT4_VALUES: Array = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
# What NumPy has as it is, and what is as common.
_COMMON = frozenset(
    getattr(torch, name)
    for name in [
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ]
)
_FLOAT8 = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
_BYTES = [f"{sign}{width}" for sign in ("int", "uint") for width in range(1, 8)]
_BYTES += ["bits8", "bits1x8", "bits2x4", "bits4x2"]
_CONVERSIONS: dict[str, Callable[[torch.Tensor], Array]] = {
    "torch.bfloat16": _from_bfloat16,
    "torch.complex32": _from_complex32,
    "torch.float4_e2m1fn_x2": _from_float4_pairs,
    "torch.bits16": _from_bits16,
    **{f"torch.{name}": _from_float8 for name in _FLOAT8},
    **{f"torch.{name}": _from_bytes for name in _BYTES},
}


# From an array to a tensor


def _strided(
    array: Array,
    description: Description,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Lay the elements out in a storage of the true size, then view it."""
    elements = _true_bits(array, dtype)
    shape = tuple(description.get("shape", elements.shape))
    stride = tuple(description.get("stride", _contiguous_stride(elements.shape)))
    offset = description.get("storage_offset", 0)
    extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    count = offset + (extent if elements.size else 0)
    storage = torch.zeros(count * elements.itemsize, dtype=torch.uint8, device="cpu")
    if elements.size:
        flat = storage.numpy().view(elements.dtype)[offset:]
        byte_stride = tuple(step * elements.itemsize for step in stride)
        # Where elements overlap (stride 0) the same value is written several times.
        np.lib.stride_tricks.as_strided(flat, shape, byte_stride)[...] = elements
    moved = storage if device is None else storage.to(device)
    return moved.view(dtype).as_strided(shape, stride, offset)


def _true_bits(array: Array, dtype: torch.dtype) -> Array:
    """The elements in the dtype's own bits, as opaque items of its size."""
    name = str(dtype)
    array = np.asarray(array)
    if dtype is torch.bfloat16:
        array = (_contiguous(array).view(np.uint32) >> 16).astype(np.uint16)
    elif dtype is torch.complex32:
        halves = np.stack([array.real, array.imag], axis=-1).astype(np.float16)
        array = _contiguous(halves).view(np.uint32)[..., 0]
    elif name.removeprefix("torch.") in _FLOAT8:
        array = _nearest_code(array, _float8_values(dtype))
    elif dtype is torch.float4_e2m1fn_x2:
        codes = _nearest_code(array, FLOAT4_VALUES)
        array = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return _contiguous(array).view(np.dtype((np.void, array.itemsize)))


def _contiguous(array: Array) -> Array:
    """Like `np.ascontiguousarray`, which would make a 0-d array 1-d."""
    return np.asarray(array, order="C")


def _nearest_code(array: Array, values: Array) -> Array:
    """Find the code of each value by its exact bits, so that -0.0 and NaN keep their sign.

    Where two codes have one value, as NaNs of float8_e5m2 have, it is the higher one: the one that
    torch itself makes.
    """
    table = values.view(np.uint32)
    order = (len(table) - 1 - np.argsort(table[::-1], kind="stable")).astype(np.uint8)
    bits = _contiguous(array).view(np.uint32)
    return cast(Array, order[np.searchsorted(table[order], bits).clip(max=len(table) - 1)])


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _quantised(array: Array, quantizer: Description, dtype: torch.dtype) -> torch.Tensor:
    dense = torch.from_numpy(np.array(array, dtype=np.float32))
    if "axis" not in quantizer:
        return torch.quantize_per_tensor(dense, quantizer["scale"], quantizer["zero_point"], dtype)
    scales = torch.tensor(quantizer["scale"], dtype=torch.float64, device="cpu")
    whole = all(isinstance(point, int) for point in quantizer["zero_point"])
    zero_points = torch.tensor(
        quantizer["zero_point"], dtype=torch.int64 if whole else torch.float32, device="cpu"
    )
    if not whole:
        scales = scales.float()
    return torch.quantize_per_channel(dense, scales, zero_points, quantizer["axis"], dtype)


def _sparse(dense: torch.Tensor, description: Description) -> torch.Tensor:
    facts = description["sparse"]
    layout = description["layout"]
    if layout == "torch._mkldnn":
        return dense.to_mkldnn()
    if layout == "torch.sparse_coo":
        return dense.to_sparse(facts["sparse_dim"])
    return dense.to_sparse(
        layout=getattr(torch, layout.removeprefix("torch.")),
        blocksize=facts.get("blocksize"),
        dense_dim=facts["dense_dim"],
    )


# Facts of a tensor


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it has no facts but those that every tensor has."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and _torch_private.is_plain_on_cpu(tensor)
        and (tensor.untyped_storage().data_ptr() != 0 or not tensor.numel())
    )


def _described(tensor: torch.Tensor) -> Description:
    """What `describe` gives for an ordinary tensor."""
    description: Description = {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "storage_offset": tensor.storage_offset(),
        "device": "cpu",
    }
    if tensor.requires_grad:
        description["requires_grad"] = True
    return description


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _dtensor_facts(tensor: torch.Tensor) -> Description:
    distributed = cast(Any, tensor)
    return {
        "shape": [int(size) for size in distributed.shape],
        "placements": [str(placement) for placement in distributed.placements],
        "mesh": str(distributed.device_mesh),
    }


def _kind(tensor: torch.Tensor) -> str:
    name = type(tensor).__name__
    return "a tensor" if name in ("Tensor", "Parameter") else f"a {name}"


def _subclass(tensor: torch.Tensor) -> str | None:
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def _quantizer(tensor: torch.Tensor) -> Description | None:
    if not tensor.is_quantized:
        return None
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "scale": tensor.q_per_channel_scales().tolist(),
        "zero_point": tensor.q_per_channel_zero_points().tolist(),
        "axis": tensor.q_per_channel_axis(),
    }


def _sparse_facts(tensor: torch.Tensor) -> Description | None:
    if tensor.layout is torch.strided or tensor.is_nested:
        return None
    if str(tensor.layout) == "torch._mkldnn":
        return {}
    values = tensor.values() if tensor.layout is not torch.sparse_coo else None
    facts: Description = {"sparse_dim": tensor.sparse_dim(), "dense_dim": tensor.dense_dim()}
    if values is not None and tensor.layout in (torch.sparse_bsr, torch.sparse_bsc):
        batch = tensor.dim() - tensor.sparse_dim() - tensor.dense_dim()
        facts["blocksize"] = list(values.shape[batch + 1 : batch + 3])
    return facts


_FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda tensor: str(tensor.dtype),
    "shape": lambda tensor: [int(size) for size in tensor.shape],
    "stride": lambda tensor: [int(step) for step in tensor.stride()],
    "storage_offset": lambda tensor: int(tensor.storage_offset()),
    "device": lambda tensor: str(tensor.device),
    "npu_format": _torchair_private.npu_format,
    "layout": lambda tensor: None if tensor.layout is torch.strided else str(tensor.layout),
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conj": lambda tensor: tensor.is_conj(),
    "neg": lambda tensor: tensor.is_neg(),
    "subclass": _subclass,
    "quantizer": _quantizer,
    "sparse": _sparse_facts,
}
