"""A wrong kernel within a scope is found in the values that the compiled code has made."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.analysis import tapped_faults as faults
from torchair_scope.analysis.compare import compare
from torchair_scope.analysis.load import load
from torchair_scope.analysis.replay import replay

pytestmark = pytest.mark.slow

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEEDS = {
    "wrong kernel": 10,
    "dropped cast": 6,
    "reordered reduction": 6,
    "stale buffer": 8,
    "mask off by one": 4,
    "wrong epsilon": 6,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Interpreted dumps without a fault, and the operators that a tapped graph has, by dtype."""
    made = {}
    for name, dtype in DTYPES.items():
        path, compiler = tmp_path_factory.mktemp(name), faults.Compiler()
        faults.run(path / "golden", dtype, "aot_eager", "interpret")
        faults.run(path / "tapped", dtype, compiler, "tap")
        made[name] = path, compiler.seen
    return made


def test_forty_faults_are_planted():
    assert sum(SEEDS.values()) == 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_operator_is_named_where_there_is_no_fault(sound, dtype):
    path, _ = sound[dtype]
    assert compare(path / "golden", path / "tapped").verdict.kind == "agrees"
    assert {each.verdict for each in replay(path / "tapped")} == {"rounding"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_operator_of_inductor_is_named(sound, tmp_path, dtype):
    path, _ = sound[dtype]
    faults.run(tmp_path / "inductor", DTYPES[dtype], "inductor", "tap")
    verdict = compare(path / "golden", tmp_path / "inductor").verdict
    assert verdict.kind == "agrees", verdict.text
    replays = replay(tmp_path / "inductor")
    assert not [each for each in replays if each.verdict == "bug"]


@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind, count in SEEDS.items() for seed in range(count)]
)
def test_a_fault_inside_the_scope_is_named_first(sound, tmp_path, kind, seed):
    dtype = list(DTYPES)[seed % 2]
    path, seen = sound[dtype]
    places = faults.candidates(seen, kind, seed)
    place = places[seed // 2 % len(places)]
    compiler = faults.Compiler(place, faults.KINDS[kind][1]())
    faults.run(tmp_path / "tapped", DTYPES[dtype], compiler, "tap")
    assert compiler.is_planted
    said = named_by_compare(path / "golden", tmp_path / "tapped")
    replayed = named_by_replay(tmp_path / "tapped")
    assert place in (said, replayed), (place, said, replayed)


@pytest.mark.parametrize("kind", SEEDS)
def test_an_interpreted_scope_does_not_run_what_is_wrong(sound, tmp_path, kind):
    path, seen = sound["float32"]
    place = faults.candidates(seen, kind, seed=0)[0]
    compiler = faults.Compiler(place, faults.KINDS[kind][1]())
    faults.run(tmp_path / "interpreted", torch.float32, compiler, "interpret")
    assert not compiler.is_planted
    assert compare(path / "golden", tmp_path / "interpreted").verdict.kind == "agrees"


def named_by_compare(golden, target):
    verdict = compare(golden, target).verdict
    if verdict.kind != "made":
        return None
    call = verdict.call.pair.target
    return faults.Place(call.graph.direction, call.node)


def named_by_replay(path):
    directions = {graph.name: graph.direction for rank in load(path).ranks for graph in rank.graphs}
    for each in replay(path):
        if each.verdict == "bug":
            return faults.Place(directions[each.graph], each.node)
    return None


def test_a_wrong_kernel_of_inductor_is_named_where_a_decomposed_operator_uses_it(
    sound, tmp_path, monkeypatch
):
    lowerings = importlib.import_module("torch._inductor.lowering").lowerings
    erf, tanh = torch.ops.aten.erf.default, torch.ops.aten.tanh.default
    monkeypatch.setitem(lowerings, erf, lowerings[tanh])
    path, _ = sound["float32"]
    with torch._inductor.config.patch(fx_graph_cache=False):
        faults.run(tmp_path / "tapped", torch.float32, "inductor", "tap")
        torch._dynamo.reset()
        faults.run(tmp_path / "interpreted", torch.float32, "inductor", "interpret")
    verdict = compare(path / "golden", tmp_path / "tapped").verdict
    assert verdict.call.pair.target.target == "aten.gelu.default", verdict.text
    assert compare(path / "golden", tmp_path / "interpreted").verdict.kind == "agrees"
