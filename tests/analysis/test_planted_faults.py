"""The first wrong operator is found: faults in the scope, before it, and none at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.analysis import faults
from torchair_scope.analysis.compare import compare
from torchair_scope.analysis.load import load

pytestmark = pytest.mark.slow

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = {
    "perturbed": lambda: faults.changing_one_output(faults.perturbed),
    "rounded": lambda: faults.changing_one_output(faults.rounded),
    "NaN": lambda: faults.changing_one_output(faults.with_nan),
    "swapped": lambda: faults.swapped,
    "stale": faults.stale,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Dumps without a fault, by dtype and backend."""
    folder = tmp_path_factory.mktemp("sound")
    paths = {}
    for name, dtype in DTYPES.items():
        for backend in ("eager", "aot_eager", "inductor"):
            paths[name, backend] = folder / f"{name}-{backend}"
            faults.run(paths[name, backend], dtype, backend)
    return paths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backends", [("aot_eager", "inductor"), ("inductor", "aot_eager")])
def test_no_operator_is_named_where_there_is_no_fault(sound, dtype, backends):
    golden, target = (sound[dtype, backend] for backend in backends)
    comparison = compare(golden, target)
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    assert {result.role for result in comparison.results} <= {"agrees", "amplifies"}
    assert {result.pair.golden.graph.direction for result in comparison.results} == {
        "forward",
        "backward",
    }
    assert not (comparison.only_golden)
    assert not (comparison.only_target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_golden_run_of_eager_code_agrees_forward_and_backward(sound, dtype, backend):
    """Only `detach`, and what the compiled backward computes once more, have no partner."""
    comparison = compare(sound[dtype, "eager"], sound[dtype, backend])
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    assert {call.target for call in comparison.only_golden} == {"aten.detach.default"}
    assert {call.graph.direction for call in comparison.only_target} == {"backward"}
    calls = [result.pair.target for result in comparison.results]
    computed = {call.target for call in calls if call.graph.direction == "backward"}
    assert {"aten.gelu_backward.default", "aten.native_layer_norm_backward.default"} <= computed
    assert {"aten._softmax_backward_data.default", "aten.tanh_backward.default"} <= computed


@pytest.mark.parametrize("golden", ["eager", "aot_eager"])
def test_a_bfloat16_run_agrees_with_its_float32_golden(sound, golden):
    comparison = compare(sound["float32", golden], sound["bfloat16", "inductor"])
    assert comparison.verdict.kind == "agrees", comparison.verdict.text


def candidates(path, kind, seed):
    """Calls that the fault changes, in an order that the seed decides."""
    calls = load(path).calls(step=faults.STEPS - 1)
    random.Random(seed).shuffle(calls)
    for call in calls:
        output = call.tensors.get("OUTPUT.0")
        # They compute nothing, and an eager run has others of them: they have no golden partner.
        if output is None or call.target == "aten.detach.default":
            continue
        value = output.torch()
        if kind == "rounded" and torch.equal(faults.rounded(value, random.Random()), value):
            continue
        if kind == "stale" and torch.equal(value, earlier(path, call).torch()):
            continue
        if kind == "swapped" and not can_be_swapped(call):
            continue
        yield call


def earlier(path, call):
    calls = load(path).calls(node=call.node, step=0, target=call.target)
    (before,) = (each for each in calls if each.graph.name == call.graph.name)
    return before.tensors["OUTPUT.0"]


def can_be_swapped(call):
    if "INPUT.1" not in call.tensors or call.target in ("aten.add.Tensor", "aten.mul.Tensor"):
        return False
    one, other = (call.tensors[slot] for slot in ("INPUT.0", "INPUT.1"))
    described = one.description and other.description
    return described and one.shape == other.shape


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_the_scope_is_named_first(sound, tmp_path, kind, seed):
    dtype = ["float32", "bfloat16"][seed % 2]
    call = next(candidates(sound[dtype, "aot_eager"], kind, seed))
    with faults.faulty_operator(call.node, KINDS[kind](), seed):
        faults.run(tmp_path / "faulty", DTYPES[dtype], "aot_eager")
    for golden in ("inductor", "eager"):
        verdict = compare(sound[dtype, golden], tmp_path / "faulty").verdict
        assert verdict.kind == "made", f"{golden}, {call}: {verdict.text}"
        named = verdict.call.pair.target
        assert (named.node, named.target) == (call.node, call.target), verdict.text


@pytest.mark.parametrize("seed", range(10))
def test_a_fault_before_the_scope_is_said_to_come_from_outside(sound, tmp_path, seed):
    dtype = ["float32", "bfloat16"][seed % 2]
    faults.run(tmp_path / "faulty", DTYPES[dtype], faults.faulty_compiler(seed, piece=0))
    verdict = compare(sound[dtype, "inductor"], tmp_path / "faulty").verdict
    assert verdict.kind == "outside", verdict.text
    named = verdict.call.pair.target
    assert (named.node, verdict.slot) == first_other_input(
        sound[dtype, "aot_eager"], tmp_path / "faulty"
    )


def first_other_input(golden, target):
    """The first input that is not as it should be, by names and files alone."""
    for one, other in zip(load(golden).calls(), load(target).calls(), strict=True):
        assert one.node == other.node
        for slot, tensor in one.inputs.items():
            wanted, got = tensor.numpy(), other.tensors[slot].numpy()
            if np.abs(wanted - got).max() > 0.1 * np.abs(wanted).max():
                return other.node, slot
    raise AssertionError("no input differs")
