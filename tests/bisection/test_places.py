"""A bisection looks where it is told to: by module, line of the source, or node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func

import torchair_scope as torchair
from tests.support import encoder as encoder_of
from tests.support.encoder import encoder
from torchair_scope.bisection.plan import findings_in

INPUT = torch.arange(2 * 4 * 8, dtype=torch.float32).sin().reshape(2, 4, 8)


def wrong_gelus(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A compiler that takes each gelu a thousandth too large."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.001))
        node.replace_all_uses_with(wrong, lambda user, wrong=wrong: user is not wrong)
    gm.recompile()
    return make_boxed_func(gm.forward)


def line_of(code: str) -> int:
    """The line of the encoder's file that has a text."""
    lines = Path(encoder_of.__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if code in line)
    return number


def bisect(**where: Any) -> Any:
    options = {"backend": wrong_gelus}
    model = torch.compile(encoder(3, 8), backend="torchair_scope", options=options)

    def run(x: torch.Tensor) -> None:
        with torch.no_grad():
            model(x)

    return torchair.bisect(run, [INPUT], pieces=40, **where)


def named(found: Any) -> list[str]:
    return [node["name"] for node in found.operators]


def test_without_a_place_the_first_error_is_found() -> None:
    assert named(bisect()) == ["gelu"]


@pytest.mark.parametrize("module", ["1", "[1-9]*", ("no_such", "1.*", "1")])
def test_a_module_and_those_in_it_are_looked_at_alone(module: Any, tmp_path: Path) -> None:
    found = bisect(module=module, folder=tmp_path)
    assert (found.outcome, named(found)) == ("found", ["gelu_1"])
    first = findings_in(tmp_path / "run_1" / "findings.jsonl")
    assert all(finding.start > 0 for finding in first), "layer 0 was judged"


def test_a_module_without_an_error_agrees() -> None:
    assert bisect(module=["0.norm1", "*.qkv"]).outcome == "agrees"


def test_lines_of_the_source_are_looked_at_alone() -> None:
    gelu, softmax = line_of("functional.gelu"), line_of("scores.softmax")
    assert bisect(source=f"encoder.py:{softmax}").outcome == "agrees"
    found = bisect(source=f"support/encoder.py:{softmax}-{gelu}", module="2")
    assert named(found) == ["gelu_2"]


def test_a_node_range_is_looked_at_alone() -> None:
    assert named(bisect(nodes="gelu_1..addmm_9")) == ["gelu_1"]
    assert bisect(nodes=["gelu_1..gelu_2", "add"], module="0").outcome == "agrees"
    assert named(bisect(nodes="gelu_2")) == ["gelu_2"]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"module": "layers.3"}, "is in module layers.3. There are modules: 0.norm1, 0.qkv"),
        ({"source": "model.py:3"}, r"source model.py:3. There are sources: .*encoder.py:\d+-\d+"),
        ({"nodes": "gelu_7"}, "nodes gelu_7. There are nodes: gelu"),
    ],
)
def test_a_place_that_is_nowhere_is_an_error_that_tells_what_there_is(
    where: dict[str, str], told: str
) -> None:
    with pytest.raises(RuntimeError, match=told):
        bisect(**where)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"module": ""}, "module is empty"),
        ({"source": "model.py:60-40"}, "source is 'model.py:60-40'; it can be a file with lines"),
        ({"source": "model.py:0"}, "counted from 1"),
        ({"source": "model.py:"}, "it can be a file with lines"),
        ({"source": ""}, "source is empty"),
        ({"nodes": "add_1:mul"}, "nodes is 'add_1:mul'; it can be the name of a node"),
    ],
)
def test_what_can_be_no_place_is_an_error_before_anything_runs(
    where: dict[str, str], told: str
) -> None:
    def never() -> None:
        raise AssertionError("it ran")

    with pytest.raises(ValueError, match=told):
        torchair.bisect(never, **where)  # type: ignore[arg-type]


def test_a_bisection_of_another_place_is_another_one(tmp_path: Path) -> None:
    bisect(module="0", folder=tmp_path)
    assert named(bisect(module="0", folder=tmp_path)) == ["gelu"]
    with pytest.raises(ValueError, match="is the folder of another bisection"):
        bisect(module="1", folder=tmp_path)
