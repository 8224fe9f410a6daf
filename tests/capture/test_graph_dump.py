"""The text that a graph is written as."""

from __future__ import annotations

import ast
import operator
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

import torchair_scope
from torchair_scope.capture.graph_dump import write_graph


def aten_graph(
    function: Callable[..., object], *args: object, dynamic: bool = False
) -> GraphModule:
    """The ATen graph that `function` gives when it is called with `args`."""
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: list[object]) -> GraphModule:
        graphs.append(gm)
        return gm

    backend = aot_autograd(fw_compiler=keep)
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return graphs[0]


def written(gm: GraphModule, tmp_path: Path) -> list[str]:
    path = tmp_path / "graph.py"
    write_graph(gm, path)
    text = path.read_text()
    assert ast.parse(text).body == [], "a graph dump is valid Python, comments only"
    return text.splitlines()


def test_an_operator_is_written_with_its_type_and_arguments(tmp_path: Path) -> None:
    def add_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) + y

    lines = written(aten_graph(add_twice, torch.ones(2, 2), torch.ones(2, 2)), tmp_path)
    assert (
        "## FX Code: add_1: torch.float32[2, 2]cpu = torch.ops.aten.add.Tensor(add, arg1_1)"
        in lines
    )


def test_every_node_is_written_once_in_order(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = x.exp().topk(2)
        return values, indices

    gm = aten_graph(model, torch.ones(3, 4))
    lines = [line for line in written(gm, tmp_path) if line.startswith("## FX Code: ")]
    names = [re.match(r"## FX Code: (\w+)", line)[1] for line in lines]  # type: ignore[index]
    expected = [node.name for node in gm.graph.nodes if node.op != "output"]
    assert names == [*expected, "return"]


def test_a_value_of_several_tensors_is_written_as_a_tuple(tmp_path: Path) -> None:
    lines = written(aten_graph(lambda x: x.topk(1)[0], torch.ones(3)), tmp_path)
    assert (
        "## FX Code: topk: (torch.float32[1]cpu, torch.int64[1]cpu) = "
        "torch.ops.aten.topk.default(arg0_1, 1)"
    ) in lines
    assert "## FX Code: getitem: torch.float32[1]cpu = operator.getitem(topk, 0)" in lines


def test_keyword_arguments_are_written_with_their_names(tmp_path: Path) -> None:
    lines = written(
        aten_graph(lambda x: torch.zeros_like(x, dtype=torch.float16), torch.ones(3)), tmp_path
    )
    code = next(line for line in lines if "zeros_like" in line or "full" in line)
    assert "dtype=torch.float16" in code


def test_sizes_that_change_are_written_as_symbols(tmp_path: Path) -> None:
    gm = aten_graph(lambda x: x * x.size(0), torch.ones(3, 4), dynamic=True)
    symbol = str(gm.graph.find_nodes(op="placeholder")[0].meta["val"])
    text = "\n".join(written(gm, tmp_path))
    assert f'## FX Code: arg0_1: "Sym({symbol})" = placeholder()' in text
    assert f"torch.float32[{symbol}, " in text


def test_a_node_follows_the_line_of_code_it_comes_from(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return doubled.sin().cos()

    first_line = model.__code__.co_firstlineno
    lines = written(aten_graph(model, torch.ones(2)), tmp_path)
    heading = f'# File "{__file__}", line {first_line + 1}: doubled = x * 2'
    assert lines[lines.index(heading) + 1].startswith("## FX Code: mul:")
    heading = f'# File "{__file__}", line {first_line + 2}: return doubled.sin().cos()'
    after = lines[lines.index(heading) + 1 :]
    assert after[0].startswith("## FX Code: sin:")
    assert after[1].startswith("## FX Code: cos:")
    assert lines.count(heading) == 1


def test_the_scope_of_a_node_is_written_above_it(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torchair_scope.scope.data_dump("outer"), torchair_scope.scope.data_dump("inner"):
            x = x.sin()
        return x.cos()

    lines = written(aten_graph(model, torch.ones(2)), tmp_path)
    scope = lines.index("# Scope outer/inner")
    assert lines[scope + 1].startswith("## FX Code: sin:")
    assert sum(line.startswith("# Scope") for line in lines) == 1
    assert lines.index(next(line for line in lines if "aten.cos" in line)) > scope + 1


def test_bodies_of_control_flow_are_written_after_the_graph(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))

    lines = written(aten_graph(model, torch.ones(2)), tmp_path)
    assert any("= torch.ops.higher_order.cond(gt, true_graph_0" in line for line in lines)
    body = lines[lines.index("# Graph true_graph_0") :]
    assert any("aten.sin" in line for line in body)


def test_nodes_without_any_meta_are_written_by_name(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    pair: Node = graph.call_function(operator.add, (x, 1))
    graph.output([pair, None])
    lines = written(GraphModule(torch.nn.Module(), graph), tmp_path)
    assert lines == [
        "## FX Code: x = placeholder()",
        "## FX Code: add = operator.add(x, 1)",
        "## FX Code: return [add, None]",
    ]


def test_text_that_would_break_the_file_stays_in_its_comment(tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(print, ("a\nimport os",))
    node.meta["stack_trace"] = '  File "a\udcff b.py", line 1, in f\n    open("File x.txt")\n'
    graph.output(None)
    lines = written(GraphModule(torch.nn.Module(), graph), tmp_path)
    assert '# File "a\\udcff b.py", line 1: open("File x.txt")' in lines
    assert r"## FX Code: print_1 = builtins.print('a\nimport os')" in lines


def test_the_folder_is_made_and_nothing_but_the_file_is_left(tmp_path: Path) -> None:
    gm = aten_graph(torch.sin, torch.ones(2))
    path = tmp_path / "new" / "folder" / "graph.py"
    write_graph(gm, path)
    assert os.listdir(path.parent) == ["graph.py"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", target)

    gm = aten_graph(torch.sin, torch.ones(2))
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left.*graph\.py"):
        write_graph(gm, tmp_path / "graph.py")
    assert os.listdir(tmp_path) == []
