"""What is measured of a tensor, against NumPy, for every dtype and kind of tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchair_scope.store.arrays import UnsavableTensorError, to_numpy
from torchair_scope.store.bits_hash import PERIOD
from torchair_scope.store.measuring import Measured, _values_and_bytes, results, statistics_of
from torchair_scope.store.measuring_on_device import rows_on_device
from torchair_scope.store.statistics import STATISTICS

pytestmark = pytest.mark.usefixtures("kernels")


def expected(array, smallest_normal=0.0):
    """The statistics of an array, but for the hash, as docs/statistics.md defines them."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    with np.errstate(invalid="ignore"):  # NaNs of the kind that signals
        values = array.astype(np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    some = finite.size > 0
    return {
        "count": values.size,
        "minimum": finite.min() if some else math.nan,
        "maximum": finite.max() if some else math.nan,
        "mean": finite.mean() if some else math.nan,
        "std": finite.std() if some else math.nan,
        "norm": np.linalg.norm(finite),
        "zeros": np.sum(values == 0),
        "subnormals": np.sum((values != 0) & (np.abs(values) < smallest_normal)),
        "nans": np.sum(np.isnan(values)),
        "positive_infinities": np.sum(values == math.inf),
        "negative_infinities": np.sum(values == -math.inf),
    }


def hash_of(array):
    """The hash of a contiguous array's bytes, by its definition."""
    data = np.frombuffer(array.tobytes(), np.uint8).copy()
    data[:-5] ^= data[5:].copy()
    words = np.frombuffer(data.tobytes() + bytes(-data.size % 8), "<u8")

    def odd(number):
        state = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return state ^ state >> np.uint64(31) | np.uint64(1)

    index = np.arange(words.size)
    weights = odd(index % 2**15) * odd(2**32 + index // 2**15)
    return f"{int((words * weights).sum(dtype=np.uint64)):016x}"


def on_a_device(tensor):
    """The same by what runs on a device, where there is none."""
    values, data, tiny = _values_and_bytes(tensor)
    return results([Measured(values.numel(), list(rows_on_device(values, data, tiny)))])[0]


def check(tensor, array, smallest_normal=0.0):
    wanted = expected(array, smallest_normal)
    for found in (statistics_of(tensor), on_a_device(tensor)):
        assert {name: getattr(found, name) for name in wanted} == pytest.approx(
            wanted, rel=1e-12, nan_ok=True
        )
    assert statistics_of(tensor).hash == on_a_device(tensor).hash


def numbers(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * 100


FLOATS = ["float64", "float32", "float16", "bfloat16"]
LENGTHS = [1, 5, 64, 1000, 2**15, 2**16 + 3, 300_001]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_numbers(dtype, length):
    dtype = getattr(torch, dtype)
    tensor = numbers(length).to(dtype)
    check(tensor, to_numpy(tensor), torch.finfo(dtype).smallest_normal)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_subnormals_and_what_is_not_finite_are_counted(dtype):
    dtype = getattr(torch, dtype)
    tensor = numbers(100_000).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    special = [0.0, -0.0, tiny, tiny / 2, -tiny / 4, math.nan, math.inf, math.inf, -math.inf]
    for position, value in enumerate(special):
        tensor[position * 11_111 % 100_000] = value
    check(tensor, to_numpy(tensor), tiny)
    found = statistics_of(tensor)
    assert (found.zeros, found.subnormals, found.nans) == (2, 2, 1)
    assert (found.positive_infinities, found.negative_infinities) == (2, 1)
    assert (found.infinities, found.nonfinite) == (3, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_is_finite(value):
    check(torch.full((70_000,), value), np.full(70_000, value))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_whole_numbers(dtype):
    tensor = numbers(70_000).to(getattr(torch, dtype))
    check(tensor, tensor.numpy())


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_numbers(dtype):
    array = np.array([0, 1, 2, np.iinfo(dtype).max, np.iinfo(dtype).max - 1], dtype)
    check(torch.from_numpy(array), array)


def test_whole_numbers_are_taken_as_float64():
    found = statistics_of(torch.tensor([2**62 + 1, -(2**63)]))
    assert (found.minimum, found.maximum) == (-(2.0**63), 2.0**62)


@pytest.mark.parametrize("array", [np.arange(70_000) % 3 == 0, np.array([True]), np.zeros(3, bool)])
def test_truth_values(array):
    check(torch.from_numpy(array), array)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_of_complex_numbers_the_parts_are_taken(dtype):
    tensor = torch.complex(numbers(40_000), numbers(40_000, seed=1)).to(getattr(torch, dtype))
    tensor[3] = complex(math.nan, 2)
    tiny = torch.finfo(tensor.dtype).smallest_normal
    check(tensor, tensor.numpy(), tiny)
    check(tensor.conj(), tensor.numpy().conj(), tiny)
    check(tensor[:9].conj().imag, tensor.numpy().conj()[:9].imag, tiny)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_half_precision_complex_numbers():
    tensor = torch.complex(numbers(100).half(), numbers(100, seed=1).half())
    parts = torch.view_as_real(tensor).numpy()
    check(tensor, parts, torch.finfo(torch.float16).smallest_normal)


FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_each_value_of_float8(dtype):
    dtype = getattr(torch, dtype)
    tensor = torch.arange(256, dtype=torch.uint8).repeat(1500).view(dtype)
    check(tensor, to_numpy(tensor), torch.finfo(dtype).smallest_normal)
    assert statistics_of(tensor).hash == hash_of(tensor.view(torch.uint8).numpy())


def test_pairs_of_float4():
    tensor = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float4_e2m1fn_x2)
    check(tensor, to_numpy(tensor), smallest_normal=1.0)
    assert statistics_of(tensor).count == 512


@pytest.mark.parametrize("dtype", ["int4", "uint3", "bits8", "bits16"])
def test_what_has_no_operators(dtype):
    dtype = getattr(torch, dtype)
    plain = torch.arange(256, dtype=torch.uint8 if dtype.itemsize == 1 else torch.int16)
    tensor = plain.view(dtype)
    check(tensor, to_numpy(tensor))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_values_are_measured_and_the_quants_hashed():
    tensor = torch.quantize_per_tensor(numbers(1000).float(), 0.5, 10, torch.qint8)
    check_values = expected(tensor.dequantize().numpy())
    found = statistics_of(tensor)
    assert found.minimum == check_values["minimum"]
    assert found.std == pytest.approx(check_values["std"])
    assert found.subnormals == 0
    assert found.hash == hash_of(tensor.int_repr().numpy())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_of_sparse_tensors_the_dense_value_is_measured(layout):
    dense = torch.eye(6).mul(3)
    tensor = dense.to_sparse(layout=layout)
    check(tensor, dense.numpy(), torch.finfo(torch.float32).smallest_normal)


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, 0, dtype=torch.int8)])
def test_an_empty_tensor_has_no_value(tensor):
    check(tensor, tensor.numpy())
    found = statistics_of(tensor)
    assert (found.count, found.norm, found.hash) == (0, 0.0, "0" * 16)
    assert math.isnan(found.minimum)


def test_a_single_number():
    check(torch.tensor(3.5), np.array(3.5))
    assert statistics_of(torch.tensor(3.5)).std == 0


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_what_has_no_data_is_refused(kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.ones(3, device="meta")
    if kind == "fake":
        tensor = FakeTensorMode().from_tensor(torch.ones(3))
    with pytest.raises(UnsavableTensorError):
        statistics_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_spread_around_a_large_mean_is_not_lost(dtype):
    array = (numbers(200_000) * 1e-2 + 1e6).to(dtype).numpy()
    wanted = array.astype(np.float64).std()
    assert statistics_of(torch.from_numpy(array)).std == pytest.approx(wanted, rel=1e-9)


def test_equal_values_have_no_spread():
    assert statistics_of(torch.full((100_000,), 0.1)).std == 0


def test_sums_are_those_of_float64():
    array = np.concatenate([np.full(100_000, 1e8), np.full(100_000, 1e-3)]).astype(np.float32)
    exact = math.fsum(array.tolist()) / array.size
    assert statistics_of(torch.from_numpy(array)).mean == pytest.approx(exact, rel=1e-14)


def test_the_largest_numbers_do_not_raise():
    found = statistics_of(torch.full((4,), 1e300, dtype=torch.float64))
    assert (found.maximum, found.norm, found.std) == (1e300, math.inf, 0)


def test_views_are_measured_as_they_are_seen():
    whole = numbers(60_000).float().view(200, 300)
    for view in (whole.t(), whole[1:, 3::2], whole[0, 1:], whole[:1].expand(5, 300), whole[3, 1]):
        check(view, view.numpy(), torch.finfo(torch.float32).smallest_normal)
        assert statistics_of(view).hash == hash_of(np.ascontiguousarray(view.numpy()))


def test_tensors_of_inference_mode_are_measured_and_leave_later_ones_alone():
    with torch.inference_mode():
        inside = statistics_of(torch.ones(100_000) * 2)
    assert inside == statistics_of(torch.ones(100_000) * 2)


def test_a_leaf_that_requires_a_gradient_is_measured():
    assert statistics_of(torch.nn.Parameter(torch.ones(3))).mean == 1


# --- the hash ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 8, 13, 2**18 - 1, 2**18, 2**18 + 6, 2**19 + 77])
def test_the_hash_is_that_of_its_definition(length):
    array = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    assert statistics_of(torch.from_numpy(array)).hash == hash_of(array)
    assert on_a_device(torch.from_numpy(array)).hash == hash_of(array)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int8"])
def test_a_file_of_a_common_dtype_has_the_hash(dtype):
    array = numbers(1000).numpy().astype(dtype)
    assert statistics_of(torch.from_numpy(array)).hash == hash_of(array)


def changes(array):
    """Arrays that differ from one in a way that weak sums do not see."""
    bits = array.view(f"u{array.itemsize}")
    sign = bits.dtype.type(1 << (8 * array.itemsize - 1))
    half = array.size // 2
    for part in (
        slice(None),
        slice(0, 2),
        slice(2, 4),
        slice(half),
        slice(5, half),
        slice(0, None, 2),
    ):
        changed = bits.copy()
        changed[part] ^= sign  # negated
        yield changed
        inverted = bits.copy()
        inverted[part] = ~inverted[part]
        yield inverted
    for one, other in ((0, 1), (0, half), (3, array.size - 1)):
        swapped = bits.copy()
        swapped[[one, other]] = swapped[[other, one]]
        yield swapped
    yield np.roll(bits, 1)
    yield bits[::-1].copy()
    for bit in range(8 * array.itemsize):
        one = bits.copy()
        one[half] ^= bits.dtype.type(1 << bit)
        yield one
        two = one.copy()
        two[half + 1] ^= bits.dtype.type(1 << bit)
        yield two


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
@pytest.mark.parametrize("length", [64, 10_000])
def test_every_change_changes_the_hash(dtype, length):
    array = (numbers(length) % 100).numpy().astype(dtype)
    changed = [each for each in changes(array) if each.tobytes() != array.tobytes()]
    hashes = {statistics_of(torch.from_numpy(each.view(dtype))).hash for each in changed}
    assert len(hashes) == len({each.tobytes() for each in changed})
    assert statistics_of(torch.from_numpy(array)).hash not in hashes


def test_masks_that_are_inverted_have_another_hash():
    board = torch.arange(2**16).view(256, 256).sum(0) % 2 == 0
    for mask in (board, torch.zeros(2**18 * 2, dtype=torch.bool)):
        assert statistics_of(mask).hash != statistics_of(~mask).hash


def test_the_hash_tells_a_zero_from_a_negative_one_and_nans_apart():
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert statistics_of(nans[:1]).hash != statistics_of(nans[1:]).hash
    assert statistics_of(torch.tensor(0.0)).hash != statistics_of(torch.tensor(-0.0)).hash


def test_many_tensors_are_measured_at_once():
    tensors = [numbers(10, seed=seed) for seed in range(5)]
    rows = []
    for tensor in tensors:
        values, data, tiny = _values_and_bytes(tensor)
        rows.append(Measured(values.numel(), list(rows_on_device(values, data, tiny))))
    assert [found.hash for found in results(rows)] == [statistics_of(t).hash for t in tensors]
    assert len(STATISTICS) == 12
    assert PERIOD == 2**15
