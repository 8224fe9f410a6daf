"""Metrics, against values from independent computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchair_scope.analysis import blocks
from torchair_scope.analysis.metrics import ShapesDifferError, measure
from torchair_scope.analysis.numerics import EPSILONS, TOLERANCES, rounded, tolerance_of
from torchair_scope.analysis.source import File

SEED = 3


@pytest.fixture(params=[0, 1, 1000, blocks.BLOCK, 2 * blocks.BLOCK + 7])
def pair(request):
    generator = np.random.default_rng(SEED)
    golden = generator.normal(size=request.param).astype(np.float32)
    noise = generator.normal(scale=1e-4, size=request.param)
    return golden, (golden + noise * (generator.random(request.param) < 0.1)).astype(np.float32)


def test_errors_are_those_of_a_computation_at_once(pair):
    golden, target = pair
    metrics = measure(golden, target)
    wide, other = golden.astype(np.longdouble), target.astype(np.longdouble)
    error = np.abs(other - wide)
    count = max(len(golden), 1)
    scale = float(np.abs(wide).max(initial=0)) or 1.0
    assert metrics.count == len(golden)
    assert metrics.max_absolute == pytest.approx(float(error.max(initial=0)))
    assert metrics.mean_absolute == pytest.approx(float(error.sum()) / count)
    assert metrics.rmse == pytest.approx(float(np.sqrt((error**2).sum() / count)))
    assert metrics.max_relative == pytest.approx(float(error.max(initial=0)) / scale)
    assert metrics.beyond == int((error > 1e-5 + 1.3e-6 * np.abs(wide)).sum())
    if len(golden):
        cosine = float(wide @ other / np.sqrt((wide @ wide) * (other @ other)))
        assert metrics.cosine == pytest.approx(cosine)


def test_the_worst_element_is_named_with_both_values():
    golden = torch.randn(3, 400, 500, generator=torch.Generator().manual_seed(SEED)).numpy()
    target = golden.copy()
    target[2, 17, 499] += 3
    target[0, 5, 5] -= 1
    worst = measure(golden, target).worst
    assert worst.index == (2, 17, 499)
    assert (worst.golden, worst.target) == (golden[2, 17, 499], target[2, 17, 499])


def test_a_nan_is_worse_than_any_error_and_counted_apart():
    golden = np.array([1, np.nan, np.inf, np.inf, 5, -np.inf], np.float32)
    target = np.array([1, np.nan, np.inf, -np.inf, np.nan, 9e30], np.float32)
    metrics = measure(golden, target)
    assert (metrics.nan_mismatches, metrics.infinity_mismatches, metrics.beyond) == (1, 2, 3)
    assert metrics.worst.index == (3,)
    assert metrics.max_absolute == 0


def test_equal_tensors_with_nan_are_equal():
    golden = np.array([np.nan, 1, -0.0, np.inf], np.float32)
    metrics = measure(golden, np.array([np.nan, 1, 0.0, np.inf], np.float32))
    assert metrics.equal
    assert (metrics.cosine, metrics.max_ulp) == (1.0, 0.0)


def test_relative_errors_do_not_explode_at_zero():
    golden = np.array([0, 100], np.float32)
    metrics = measure(golden, golden + np.float32([1e-4, 0]))
    assert metrics.max_relative == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ulp_distance_is_the_number_of_steps_of_nextafter(dtype):
    start = torch.tensor([-1.0, 0.0, 1.5, 1e-3, -3e4], dtype=getattr(torch, dtype))
    steps = start
    for _ in range(5):
        steps = torch.nextafter(steps, torch.full_like(steps, torch.inf))
    wide = torch.float64 if dtype == "float64" else torch.float32
    metrics = measure(start.to(wide).numpy(), steps.to(wide).numpy(), dtype, dtype)
    assert (metrics.max_ulp, metrics.mean_ulp) == (5, 5)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_ulp_distance_of_narrow_dtypes_counts_their_values(dtype):
    codes = torch.arange(8, 40, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    assert measure(codes[:-3], codes[3:], dtype, dtype).mean_ulp == 3


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
)
def test_rounding_is_that_of_torch(dtype):
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(5000, generator=generator) * torch.logspace(-6, 2, 5000)
    values[:2] = torch.tensor([0.0, torch.nan]) if "8" not in dtype else 0.0
    expected = values.to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(rounded(values.double().numpy(), dtype), expected)


def test_a_golden_of_higher_precision_is_judged_after_rounding_too():
    golden = torch.linspace(-3, 3, 1001)
    target = golden.bfloat16().float()
    metrics = measure(golden.numpy(), target.numpy(), "float32", "bfloat16")
    assert metrics.max_ulp == 0
    assert metrics.beyond_rounded == 0
    strict = measure(golden.numpy(), target.numpy(), "float32", "float32")
    assert strict.beyond > 900


def test_tolerances_are_those_of_torch_testing():
    default_tolerances = torch.testing._comparison.default_tolerances
    for dtype in ("float64", "float32", "float16", "bfloat16", "complex64", "int64", "bool"):
        ours = tolerance_of(dtype)
        assert (ours.relative, ours.absolute) == default_tolerances(getattr(torch, dtype))


def test_epsilons_are_those_of_torch():
    for dtype in EPSILONS.keys() - {"complex32", "float4_e2m1fn_x2", "float8_e8m0fnu"}:
        if dtype == "float8_e5m2fnuz":
            continue  # torch says 0.125, but 1.25 is its next value after 1
        assert EPSILONS[dtype] == torch.finfo(getattr(torch, dtype)).eps
    assert TOLERANCES.keys() == EPSILONS.keys()


def test_integers_are_compared_exactly():
    golden = np.array([2**60, 5, -1], np.int64)
    metrics = measure(golden, golden + np.array([1, 0, 0]))
    assert (metrics.beyond, metrics.max_absolute, metrics.max_ulp) == (1, 1.0, None)


def test_complex_numbers_count_as_their_parts():
    golden = np.array([1 + 2j, 3 + 4j], np.complex64)
    metrics = measure(golden, golden + np.array([0, 1j], np.complex64))
    assert (metrics.count, metrics.max_absolute, metrics.worst.index) == (4, 1.0, (1,))


def test_bools_and_scalars_are_compared():
    assert measure(np.array(True), np.array(False)).beyond == 1
    assert measure(np.array(2.0), np.array(2.0)).equal


def test_different_shapes_are_an_error():
    with pytest.raises(ShapesDifferError, match=r"golden has shape \(2,\), target \(3,\)"):
        measure(np.zeros(2), np.zeros(3))


def in_float64(golden, target, dtypes):
    """The same metrics, by a computation in float64 alone: a long double takes no short cut."""
    return measure(golden.astype(np.longdouble), target.astype(np.longdouble), *dtypes)


DISTURBANCES = {
    "one element": lambda x, noise: np.where(np.arange(x.size) == x.size // 2, x + 1, x),
    "rounding": lambda x, noise: x * (1 + 1e-6 * noise),
    "much": lambda x, noise: x + noise,
    "other signs": lambda x, noise: -x,
    "zeros": lambda x, noise: np.where(noise > 0, x, 0),
    "signed zeros": lambda x, noise: np.where(np.abs(x) < 1, -0.0 * x, x * (1 + 1e-4)),
    "huge": lambda x, noise: x * 1e30 if x.dtype.itemsize > 2 else x * 2,
    "tiny": lambda x, noise: x * 1e-25,
    "NaN": lambda x, noise: np.where(noise > 2, np.nan, x),
    "infinities": lambda x, noise: np.where(noise > 2, np.sign(x) * np.inf, x),
}


@pytest.mark.parametrize("disturb", DISTURBANCES)
@pytest.mark.parametrize(
    ("golden_dtype", "target_dtype"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float32", "float16"),
        ("float16", "float32"),
        ("float64", "float64"),
        ("float64", "float32"),
    ],
)
def test_short_cuts_change_no_metric(golden_dtype, target_dtype, disturb):
    generator = np.random.default_rng(SEED)
    size = blocks.BLOCK + 5000
    x, noise = generator.normal(size=(2, size))
    x[: size // 3] *= 100
    golden = as_stored(x, golden_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        target = as_stored(DISTURBANCES[disturb](golden.astype(np.float64), noise), target_dtype)
    expected = in_float64(golden, target, (golden_dtype, target_dtype))
    metrics = measure(golden, target, golden_dtype, target_dtype)
    for name, value in vars(expected).items():
        if isinstance(value, float):
            assert getattr(metrics, name) == pytest.approx(value, rel=1e-5, abs=1e-300), name
        else:
            assert repr(getattr(metrics, name)) == repr(value), name


def as_stored(values, dtype):
    """The values of a dtype, in the dtype of its files."""
    if dtype == "bfloat16":
        return torch.from_numpy(values).bfloat16().float().numpy()
    return values.astype(dtype)


def test_a_mapped_file_leaves_the_memory_behind_the_block_that_is_read(tmp_path):
    size = 64_000_000
    for name in ("golden", "target"):
        np.lib.format.open_memmap(tmp_path / name, "w+", np.float32, (size // 4,))[:] = 1
    before = resident()
    arrays = [File(str(tmp_path / name)).array() for name in ("golden", "target")]
    most = []
    for _, block in blocks.blocks(*arrays):
        most.append(resident() if block[0].max() == block[1].max() else 0)
    assert max(most) - before < size


def resident():
    """Bytes of files that are mapped and in memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssFile"))


@pytest.mark.parametrize("orders", ["FF", "CF", "FC"])
def test_the_order_in_memory_changes_nothing(orders):
    golden = np.random.default_rng(SEED).normal(size=(30, 40, 70)).astype(np.float32)
    target = golden.copy()
    target[3, 17, 29] += 1
    expected = measure(golden, target)
    pair = [np.asarray(each, order=o) for each, o in zip((golden, target), orders, strict=True)]
    metrics = measure(*pair)
    assert metrics.worst == expected.worst
    assert metrics.rmse == pytest.approx(expected.rmse)
