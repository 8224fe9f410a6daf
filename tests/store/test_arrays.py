from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.bits import difference
from torchair_scope.store.arrays import (
    UnsavableTensorError,
    describe,
    number_array,
    to_numpy,
    to_tensor,
)

BITS16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
BITS8 = torch.arange(2**8, dtype=torch.int32).to(torch.uint8)
NATIVE = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NATIVE += ["float16", "float32", "float64", "complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
SUB_BYTE = [f"{sign}{width}" for sign in ("int", "uint") for width in range(1, 8)]
BITS = ["bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"]
STORED_AS_BITS = [*FLOAT8, *SUB_BYTE, *BITS, "float4_e2m1fn_x2", "bfloat16", "complex32"]


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    return to_tensor(to_numpy(tensor), describe(tensor))


def raw(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.element_size()]).numpy()


def ignoring_beta_warnings(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@st.composite
def strided_tensors(draw, dtypes):
    """Views of one storage: permuted, sliced with steps, expanded, offset, 0-d and empty."""
    dtype = getattr(torch, draw(st.sampled_from(dtypes)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    seed = draw(st.integers(0, 2**31 - 1))
    count = int(np.prod(shape, dtype=int)) + 3
    data = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
    if dtype is torch.bool:
        data %= 2
    if dtype is torch.complex32:
        data &= 0x3B  # no NaN, whose payload a conversion may change
    flat = torch.from_numpy(data.reshape(-1)).view(dtype)
    tensor = (
        flat[3:count].reshape(shape) if draw(st.booleans()) else flat[: count - 3].reshape(shape)
    )
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        step = draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@settings(max_examples=300, deadline=None)
@example(torch.zeros(0, 0, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
@example(torch.tensor([15], dtype=torch.int32).view(torch.complex32).expand(2))
@given(strided_tensors([*NATIVE, *STORED_AS_BITS]))
def test_dtype_shape_strides_offset_and_every_bit_come_back(tensor):
    back = round_trip(tensor)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert back.storage_offset() == tensor.storage_offset()
    assert back.device == tensor.device
    assert np.array_equal(raw(back), raw(tensor))


@settings(max_examples=100, deadline=None)
@given(strided_tensors([*NATIVE, *STORED_AS_BITS]))
def test_an_array_has_numbers_only_and_can_be_read_by_everyone(tensor):
    array = to_numpy(tensor)
    assert array.dtype.kind in "biufc"
    assert np.dtype(array.dtype.str) == array.dtype


def test_bfloat16_is_written_as_float32_exactly():
    tensor = BITS16.view(torch.bfloat16)
    expected = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    array = to_numpy(tensor)
    assert array.dtype == np.float32
    assert np.array_equal(array.view(np.uint32), expected.view(np.uint32))
    for few in (tensor[5], tensor[:0], tensor[40_000:41_000].view(20, 50).t()):
        array, wanted = to_numpy(few), few.double().numpy().astype(np.float32)
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == wanted.tobytes()
        assert array.shape == wanted.shape


def e4m3fn(byte: int) -> float:
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e5m2(byte: int) -> float:
    return float(np.array([byte << 8], dtype=np.uint16).view(np.float16)[0])


def e8m0(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def e4m3fnuz(byte: int) -> float:
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 3 & 15, byte & 7
    if byte == 128:
        return float("nan")
    return sign * (
        mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)
    )


def e5m2fnuz(byte: int) -> float:
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 2 & 31, byte & 3
    if byte == 128:
        return float("nan")
    return sign * (
        mantissa * 2.0**-17 if exponent == 0 else (4 + mantissa) * 2.0 ** (exponent - 18)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("float8_e4m3fn", e4m3fn),
        ("float8_e5m2", e5m2),
        ("float8_e8m0fnu", e8m0),
        ("float8_e4m3fnuz", e4m3fnuz),
        ("float8_e5m2fnuz", e5m2fnuz),
    ],
)
def test_each_float8_value_is_written_as_float32_exactly(name, value):
    array = to_numpy(BITS8.view(getattr(torch, name)))
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, np.array([value(byte) for byte in range(256)], np.float32))


@pytest.mark.parametrize("name", STORED_AS_BITS)
def test_every_bit_pattern_of_a_small_dtype_comes_back(name):
    dtype = getattr(torch, name)
    patterns = BITS8 if dtype.itemsize == 1 else BITS16
    tensor = patterns.view(dtype)
    if dtype is not torch.complex32:
        assert np.array_equal(raw(round_trip(tensor)), raw(tensor))
        return
    halves = patterns.view(torch.float16)
    finite = torch.view_as_complex(halves[halves.isfinite()].reshape(-1, 2))
    assert np.array_equal(raw(round_trip(finite)), raw(finite))


def test_a_float4_pair_becomes_two_values_the_low_half_first():
    tensor = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    array = to_numpy(tensor)
    assert array.tolist() == [[0.5, 1.0, -0.0, -6.0]]
    assert np.signbit(array[0, 2])


def test_complex32_is_written_as_complex64():
    halves = torch.tensor([[1.5, -2.0], [65504.0, 2.0**-24]], dtype=torch.float16)
    array = to_numpy(torch.view_as_complex(halves))
    assert array.dtype == np.complex64
    assert array.tolist() == [1.5 - 2j, 65504 + 2.0**-24 * 1j]


def test_signed_sub_byte_integers_keep_their_sign():
    tensor = torch.tensor([-8, 7], dtype=torch.int8).view(torch.int4)
    assert to_numpy(tensor).tolist() == [-8, 7]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conj_and_neg_views_are_resolved(dtype):
    tensor = torch.tensor([1 + 2j, -3j], dtype=dtype)
    assert to_numpy(tensor.conj()).tolist() == [1 - 2j, 3j]
    assert tensor.conj().imag.is_neg()
    assert to_numpy(tensor.conj().imag).tolist() == [-2.0, 3.0]
    assert describe(tensor.conj())["conj"] is True
    assert difference(round_trip(tensor.conj()), tensor.conj()) is None


def test_a_conj_view_of_complex32_is_resolved():
    tensor = torch.view_as_complex(torch.tensor([[1.0, 2.0]], dtype=torch.float16))
    assert to_numpy(tensor.conj()).tolist() == [1 - 2j]


def test_a_tensor_that_requires_grad_is_saved_and_comes_back_without():
    tensor = torch.ones(3, requires_grad=True)
    assert to_numpy(tensor * 2).tolist() == [2, 2, 2]
    assert describe(tensor)["requires_grad"] is True
    assert not round_trip(tensor).requires_grad


def test_a_parameter_and_a_subclass_with_its_own_data_are_saved():
    class Marked(torch.Tensor):
        pass

    tensor = torch.arange(3.0)
    assert to_numpy(torch.nn.Parameter(tensor)).tolist() == [0, 1, 2]
    assert to_numpy(tensor.as_subclass(Marked)).tolist() == [0, 1, 2]
    assert describe(tensor.as_subclass(Marked))["subclass"].endswith("Marked")


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_a_quantised_tensor_is_saved_as_its_dense_value(dtype):
    dense = torch.tensor([[0.5, 1.0], [1.5, -2.0]])
    tensor = ignoring_beta_warnings(lambda: torch.quantize_per_tensor(dense, 0.5, 10, dtype))
    assert to_numpy(tensor).tolist() == dense.tolist()
    back = round_trip(tensor)
    assert back.dtype == dtype
    assert torch.equal(back.int_repr(), tensor.int_repr())
    assert (back.q_scale(), back.q_zero_point()) == (0.5, 10)


@pytest.mark.parametrize("zero_points", [torch.tensor([0, 1]), torch.tensor([0.0, 1.0])])
def test_a_tensor_quantised_per_channel_comes_back(zero_points):
    dense = torch.tensor([[0.5, 1.0], [1.5, 2.0]])
    dtype = torch.quint4x2 if zero_points.is_floating_point() else torch.quint8
    tensor = ignoring_beta_warnings(
        lambda: torch.quantize_per_channel(dense, torch.tensor([0.5, 0.25]), zero_points, 0, dtype)
    )
    back = round_trip(tensor)
    assert back.dtype == dtype
    assert torch.equal(back.dequantize(), tensor.dequantize())


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid": lambda dense: dense.to_sparse(1),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 1)),
    "bsc": lambda dense: dense.to_sparse_bsc((1, 2)),
    "mkldnn": lambda dense: dense.to_mkldnn(),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_a_sparse_tensor_is_saved_as_its_dense_value(kind):
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0], [float("nan"), 5.0]])
    tensor = ignoring_beta_warnings(lambda: SPARSE[kind](dense))
    np.testing.assert_array_equal(to_numpy(tensor), dense.numpy())
    back = round_trip(tensor)
    assert back.layout == tensor.layout
    assert torch.equal(back.to_dense().nan_to_num(7), dense.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.int8])
def test_a_sparse_tensor_of_a_small_dtype_is_saved(dtype):
    values = torch.tensor([1, 0, 1]).to(dtype)
    tensor = ignoring_beta_warnings(
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2, 3]]), values, (4,))
    )
    assert to_numpy(tensor).tolist() == [1, 0, 0, 1]


def test_an_uncoalesced_sparse_tensor_is_saved_as_the_sum_of_its_entries():
    tensor = ignoring_beta_warnings(
        lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (2,))
    )
    assert to_numpy(tensor).tolist() == [0, 5]


def test_overlapping_elements_come_back():
    tensor = torch.arange(5.0).unfold(0, 3, 1)
    assert tensor.stride() == (1, 1)
    assert difference(round_trip(tensor), tensor) is None


def test_only_the_local_shard_of_a_dtensor_is_saved():
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        assert to_numpy(tensor).shape == (2, 3)
        description = describe(tensor)
        assert description["shape"] == [2, 3]
        assert description["dtensor"]["shape"] == [4, 3]
        assert description["dtensor"]["placements"] == [str(Shard(0))]
        assert "2" in description["dtensor"]["mesh"]
        assert to_numpy(DTensor.from_local(torch.ones(2), mesh, [Replicate()])).shape == (2,)
    finally:
        dist.destroy_process_group()


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


def functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(3))


def batched() -> torch.Tensor:
    seen = []
    torch.vmap(lambda row: seen.append(row) or row)(torch.ones(3, 2))
    return seen[0]


def wrapper() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (fake, "FakeTensor"),
        (functional, "no data|storage"),
        (batched, "vmap|storage"),
        (wrapper, "TwoTensor|no data"),
        (nested, "nested"),
        (lambda: torch.empty(3, device="meta"), "meta"),
    ],
    ids=["fake", "functional", "batched", "wrapper", "nested", "meta"],
)
def test_a_tensor_without_a_value_is_refused_with_the_reason(make, reason):
    tensor = ignoring_beta_warnings(make)
    with pytest.raises(UnsavableTensorError, match=reason):
        to_numpy(tensor)
    assert isinstance(describe(tensor), dict)


def test_a_live_batched_tensor_is_refused():
    def inside(row):
        with pytest.raises(UnsavableTensorError):
            to_numpy(row)
        return row

    torch.vmap(inside)(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("value", "dtype", "listed"),
    [
        (3, "int64", 3),
        (True, "bool", True),
        (2.5, "float64", 2.5),
        (1 + 2j, "complex128", 1 + 2j),
        ([1, 2], "int64", [1, 2]),
        ((1, 2.5), "float64", [1, 2.5]),
        ([], "float64", []),
        ([True, False], "bool", [True, False]),
    ],
)
def test_numbers_become_the_array_that_torchair_saves(value, dtype, listed):
    array = number_array(value)
    assert array is not None
    assert (str(array.dtype), array.tolist()) == (dtype, listed)


@pytest.mark.parametrize(
    "value", [None, "add", [1, None], [torch.ones(1)], 2**70, [[1], [1, 2]], {}]
)
def test_what_is_no_array_of_numbers_is_none(value):
    assert number_array(value) is None


def test_the_device_can_be_chosen_on_the_way_back():
    tensor = torch.ones(2)
    assert to_tensor(to_numpy(tensor), describe(tensor), device="meta").is_meta
