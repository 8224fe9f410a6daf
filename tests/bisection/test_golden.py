"""With a golden dump an error is found that no run of the compiled graph itself can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair_scope as torchair
from tests.bisection import faults
from tests.bisection.faults import FaultyCompiler
from tests.support.encoder import encoder

LAYERS, WIDTH = 3, 8
INPUT = torch.arange(2 * 4 * WIDTH, dtype=torch.float32).sin().reshape(2, 4, WIDTH)


def dump_eagerly(path: Path, model: Any, *inputs: torch.Tensor) -> Path:
    """The golden run: no compiler sees it."""
    with torchair.scope.data_dump("golden", path=str(path)):
        model(*inputs).square().mean().backward()
    return path


def wrong_gelu(nth: int, backend: Any) -> Callable[..., Any]:
    """A backend with a pass that takes the approximate gelu in one place."""
    ours = torchair.get_npu_backend(inner=backend)

    def compile(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found = gm.graph.find_nodes(op="call_function", target=torch._C._nn.gelu)
        found[nth].kwargs = {"approximate": "tanh"}
        gm.recompile()
        return ours(gm, example_inputs)

    return compile


def train(model: Any) -> Callable[..., None]:
    def step(*inputs: torch.Tensor) -> None:
        model(*inputs).square().mean().backward()

    return step


def infer(model: Any) -> Callable[..., None]:
    def step(*inputs: torch.Tensor) -> None:
        with torch.no_grad():
            model(*inputs)

    return step


def named(found: Any) -> list[str]:
    return [node["name"] for node in found.operators]


def test_a_wrong_pass_is_found_which_no_run_of_its_graph_tells(dump_path: Path) -> None:
    golden = dump_eagerly(dump_path, encoder(LAYERS, WIDTH), INPUT)
    model = torch.compile(encoder(LAYERS, WIDTH), backend=wrong_gelu(1, "aot_eager"))
    assert torchair.bisect(train(model), [INPUT]).outcome == "agrees"

    found = torchair.bisect(train(model), [INPUT], golden, pieces=8)
    assert (found.outcome, named(found)) == ("found", ["gelu_1"])
    assert found.decisive is not None
    assert found.decisive.judged_by == "golden"
    assert "the graph that computes something else than the golden run" in str(found)
    assert found.notes == ()


def wrong_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, epsilon: float) -> Any:
    """A decomposition with an epsilon of its own."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def test_a_wrong_decomposition_is_narrowed_to_what_it_has_made_of_one_operator(
    dump_path: Path,
) -> None:
    golden = dump_eagerly(dump_path, encoder(2, WIDTH), INPUT)
    decompositions = {torch.ops.aten.native_layer_norm.default: wrong_layer_norm}
    ours = torchair.get_npu_backend(inner="aot_eager", custom_decompositions=decompositions)
    model = torch.compile(encoder(2, WIDTH), backend=ours)
    found = torchair.bisect(infer(model), [INPUT], torchair.load(golden), pieces=8)
    assert found.outcome == "hidden"
    first, last = found.operators
    assert (first["target"], first["module"]) == ("aten.mean.dim", "0.norm1")
    assert (last["target"], last["module"]) == ("aten.view.default", "0.qkv")
    assert found.decisive is not None
    assert (found.decisive.start, found.decisive.stop) == (0, 11)
    assert "The golden dump does not have the values between them" in str(found)


def by_faulty_compiler(model: Any, compiler: FaultyCompiler) -> Any:
    return torch.compile(model, backend="torchair_scope", options={"backend": compiler})


@pytest.mark.parametrize("in_backward", [False, True])
def test_faulty_compiled_code_is_found_with_a_golden_dump_as_well(
    dump_path: Path, in_backward: bool
) -> None:
    golden = dump_eagerly(dump_path, encoder(2, WIDTH), INPUT)
    target = "aten.gelu_backward.default" if in_backward else "aten.gelu.default"
    compiler = FaultyCompiler(target, 1, faults.scaled, in_backward)
    model = by_faulty_compiler(encoder(2, WIDTH), compiler)
    found = torchair.bisect(train(model), [INPUT], golden, pieces=16)
    assert found.outcome == "found"
    assert set(named(found)) == compiler.planted
    assert found.decisive is not None
    assert found.decisive.judged_by == "eager"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_bfloat16_run_agrees_with_its_float32_golden_dump(dump_path: Path, backend: str) -> None:
    golden = dump_eagerly(dump_path, encoder(2, WIDTH), INPUT)
    options = {"backend": backend}
    model = torch.compile(encoder(2, WIDTH).bfloat16(), backend="torchair_scope", options=options)
    found = torchair.bisect(train(model), [INPUT.bfloat16()], golden)
    assert (found.outcome, found.runs) == ("agrees", 1), str(found)


def test_where_the_golden_dump_has_no_values_an_eager_run_decides_and_a_note_says_so(
    dump_path: Path,
) -> None:
    right = encoder(2, WIDTH)
    right[1] = torchair.scope.dump_ops(right[1], path=str(dump_path))
    right(INPUT)
    compiler = FaultyCompiler("aten.gelu.default", 0, faults.scaled)
    model = by_faulty_compiler(encoder(2, WIDTH), compiler)
    found = torchair.bisect(infer(model), [INPUT], dump_path, pieces=8)
    assert found.outcome == "found"
    assert set(named(found)) == compiler.planted
    assert any("lacks values of the inference graph" in note for note in found.notes)


def test_a_run_that_begins_with_other_values_than_the_golden_one_is_told(dump_path: Path) -> None:
    golden = dump_eagerly(dump_path, encoder(2, WIDTH), INPUT)
    options = {"backend": "aot_eager"}
    model = torch.compile(encoder(2, WIDTH), backend="torchair_scope", options=options)
    found = torchair.bisect(infer(model), [INPUT + 1], golden)
    assert found.outcome == "agrees"
    assert any("begins with other values than the golden run" in note for note in found.notes)


def test_layers_compiled_one_by_one_are_each_compared_with_their_own_golden_values(
    dump_path: Path,
) -> None:
    golden = dump_eagerly(dump_path, encoder(LAYERS, WIDTH), INPUT)
    layers = encoder(LAYERS, WIDTH)
    compiler = torchair.get_npu_backend(inner="aot_eager")
    for layer in layers:
        layer.compile(backend=compiler)
    found = torchair.bisect(infer(layers), [INPUT], golden)
    assert found.outcome == "agrees"
    assert not any("other values" in note for note in found.notes), found.notes


def test_a_golden_dump_that_there_is_not_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    def never() -> None:
        raise AssertionError("it ran")

    with pytest.raises(FileNotFoundError, match="no_dump"):
        torchair.bisect(never, golden=tmp_path / "no_dump")


def test_a_golden_dump_without_tensors_is_an_error_before_anything_runs(dump_path: Path) -> None:
    with torchair.scope.data_dump("golden", path=str(dump_path), data="stats"):
        INPUT.sin()
    with pytest.raises(ValueError, match="in which no whole tensor was saved"):
        torchair.bisect(torch.sin, [INPUT], dump_path)


def test_a_bisection_with_another_golden_dump_is_another_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with torchair.scope.data_dump("golden", path=str(tmp_path / name)):
            INPUT.sin()
    model = torch.compile(torch.sin, backend="torchair_scope", options={"backend": "aot_eager"})
    torchair.bisect(model, [INPUT], tmp_path / "one", folder=tmp_path / "found")
    with pytest.raises(ValueError, match="is the folder of another bisection"):
        torchair.bisect(model, [INPUT], tmp_path / "two", folder=tmp_path / "found")
