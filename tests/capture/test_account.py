"""The account: what became of each operator of a scope, in numbers that add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.scope import data_dump, summary
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning


def compiled(function, path, **options):
    options = {"path": str(path), "backend": "aot_eager", **options}
    return torch.compile(function, backend="torchair_scope", options=options, fullgraph=True)


def quiet_summary():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DumpWarning)
        return summary()


def only_row():
    (row,) = quiet_summary().rows
    assert row.tagged == row.dumped + sum(row.missing.values())
    return row


def test_a_row_says_where_the_scope_was_opened_and_what_is_dumped(dump_path):
    def function(x):
        x = x * 2
        with data_dump("mine"):  # the line
            x = x.sin().cos()
        return x

    run = compiled(function, dump_path)
    run(torch.ones(3))
    run(torch.ones(3))
    row = only_row()
    lines = Path(__file__).read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, start=1) if text.endswith("# the line"))
    assert (row.scope, row.opened_at) == ("mine", f"test_account.py:{line}")
    assert (row.tagged, row.reached, row.dumped) == (2, 2, 2)
    assert (row.calls, row.tensors) == (4, 8)
    assert (row.missing, row.missing_tensors, row.remark) == ({}, {}, None)


def test_the_backward_counts_for_the_operators_that_it_comes_of(dump_path):
    def function(x):
        with data_dump("mine"):
            return x.sin().sum()

    compiled(function, dump_path)(torch.ones(3, requires_grad=True)).backward()
    row = only_row()
    assert row.tagged == row.dumped == 2
    assert row.calls == row.reached == len(read(dump_path).ranks[0].calls) > 2


def reasons(function, *inputs, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(function, path, **options)(*inputs)
    return only_row().missing


def test_dead_code_is_a_reason(dump_path):
    def function(x):
        with data_dump("mine"):
            x.exp()
            return x + 1

    missing = reasons(function, torch.ones(3), path=dump_path)
    assert missing == {"removed as dead code, since nothing uses its value": 1}


def test_operators_that_do_nothing_are_a_reason(dump_path):
    def function(x):
        with data_dump("mine"):
            return x.to(torch.float32) + 1

    missing = reasons(function, torch.ones(3), path=dump_path)
    assert missing == {"does nothing, since it gives what it is given": 1}


def test_a_list_of_what_is_given_is_no_operator_either(dump_path):
    def function(x):
        with data_dump("mine"):
            first, second = torch.broadcast_tensors(x, x)
            return first + second

    missing = reasons(function, torch.ones(3), path=dump_path)
    assert missing == {
        "does nothing, since it gives what it is given": 1,
        "takes a value out of a result that is dumped as a whole": 2,
    }


def run_with_pass(function, change, path):
    """Compile with a pass of the user's own, which changes the joint graph, and run."""
    with torch._inductor.config.patch(joint_custom_post_pass=change):
        run = compiled(function, path, backend="inductor")
        result = run(torch.ones(3))
    with torchair.scope.disabled():
        torch.testing.assert_close(result, function(torch.ones(3)))
    return only_row()


def test_what_a_pass_folds_to_a_constant_is_a_reason(dump_path):
    value = torch.full((3,), 2.0)

    def fold(graph):
        for node in list(graph.nodes):
            if node.name == "full":
                graph.owning_module.register_buffer("folded", value)
                with graph.inserting_before(node):
                    constant = graph.get_attr("folded")
                constant.meta.update(val=node.meta["val"])
                node.replace_all_uses_with(constant)
                graph.erase_node(node)

    def function(x):
        with data_dump("mine"):
            return x * torch.full((3,), 2.0)

    row = run_with_pass(function, fold, dump_path)
    assert (row.tagged, row.dumped) == (2, 1)
    assert row.missing == {"folded to a constant": 1}


def test_what_a_pass_merges_with_an_equal_operator_is_a_reason(dump_path):
    def merge(graph):
        first, second = (node for node in graph.nodes if node.name in ("sin", "sin_1"))
        second.replace_all_uses_with(first)
        graph.erase_node(second)

    def function(x):
        y = x.sin()
        with data_dump("mine"):
            return x.sin() + y

    row = run_with_pass(function, merge, dump_path)
    assert (row.tagged, row.dumped) == (2, 1)
    assert row.missing == {"merged with an equal operator (CSE)": 1}


def replaced_by_a_pass(name):
    """A pass that puts an operator of the pass's own in the place of one."""

    def replace(graph):
        node = next(node for node in graph.nodes if node.name == name)
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.aten.clone.default, node.args[:1])
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    return replace


REPLACED = "removed or replaced by a pass: no operator of the compiled graph is its own"


def test_what_a_pass_replaces_is_a_reason_of_its_own(dump_path):
    def function(x):
        y = x.relu()
        with data_dump("mine"):
            return x.abs() + y

    row = run_with_pass(function, replaced_by_a_pass("abs_1"), dump_path)
    assert (row.tagged, row.dumped) == (2, 1)
    assert row.missing == {REPLACED: 1}


def test_an_operator_on_what_was_written_to_in_between_is_no_equal_one(dump_path):
    def function(x):
        z = x + 1
        y = z.abs()
        z.mul_(1)
        with data_dump("mine"):
            return z.abs() + y

    row = run_with_pass(function, replaced_by_a_pass("abs_2"), dump_path)
    assert row.missing == {REPLACED: 1}


def test_random_operators_are_not_merged(dump_path):
    def function(x):
        with data_dump("mine"):
            return x.bernoulli() + x.bernoulli()

    def drop(graph):
        names = [node.name for node in graph.nodes if "bernoulli" in node.name]
        replaced_by_a_pass(names[-1])(graph)

    row = run_with_pass(function, drop, dump_path)
    assert row.missing == {REPLACED: 1}


# --- what is dumped without a scope --------------------------------------------------------------


def config(path):
    made = torchair.CompilerConfig()
    made.dump_config.enable_dump = True
    path.mkdir()
    made.dump_config.dump_path = str(path)
    return made


def test_whole_graphs_have_a_row(dump_path):
    made = torchair.CompilerConfig()
    made.debug.data_dump.type = "npy"
    made.debug.data_dump.path = str(dump_path)
    backend = torchair.get_npu_backend(compiler_config=made, inner="aot_eager")
    run = torch.compile(lambda x: x.sin().split(1)[0], backend=backend)
    with pytest.warns(UserWarning, match="FALLBACK"):
        run(torch.ones(3, requires_grad=True)).sum().backward()
    row = only_row()
    (rank,) = read(dump_path).ranks
    assert row.scope == "(whole graphs)"
    assert row.calls == row.dumped == len(rank.calls) > 2
    assert set(row.missing) == {"takes a value out of a result that is dumped as a whole"}


def test_named_nodes_have_a_row_and_a_name_that_matches_nothing_is_said_once(dump_path):
    made = config(dump_path)
    made.dump_config.dump_layer = "sin cos_7 tan_9"
    backend = torchair.get_npu_backend(compiler_config=made, inner="aot_eager")
    torch.compile(lambda x: x.sin().cos(), backend=backend)(torch.ones(3))
    with pytest.warns(DumpWarning, match="no graph has a node named 'cos_7', 'tan_9'"):
        (row,) = summary().rows
    assert summary().rows == [row]  # Warnings are errors: it is not said again.
    assert row.scope == "(named nodes)"
    assert (row.tagged, row.dumped, row.calls) == (1, 1, 1)


def test_named_nodes_that_lie_in_a_scope_count_for_it(dump_path):
    def function(x):
        with data_dump("mine", ops="*cos*"):
            x = x.sin()
        return x.cos()

    made = config(dump_path)
    made.dump_config.dump_layer = "sin cos"
    backend = torchair.get_npu_backend(compiler_config=made, inner="aot_eager")
    torch.compile(function, backend=backend)(torch.ones(3))
    rows = {row.scope: (row.tagged, row.dumped) for row in quiet_summary().rows}
    assert rows == {"mine": (1, 1), "(named nodes)": (1, 1)}


def test_results_taken_apart_and_sizes_are_reasons(dump_path):
    def function(x):
        with data_dump("mine"):
            first, second = x.split(2)
            return first * x.shape[0] + second

    torch._dynamo.mark_dynamic(x := torch.ones(4, 3), 1)
    missing = reasons(function, x, path=dump_path)
    assert missing == {"takes a value out of a result that is dumped as a whole": 2}


def test_selections_are_reasons(dump_path):
    def function(x):
        with data_dump("mine", steps=7, ops="*sin*"):
            return x.sin() + 1

    missing = reasons(function, torch.ones(3), path=dump_path)
    assert missing == {"not selected by ops": 1, "step not selected": 1}


def test_a_filter_is_a_reason(dump_path):
    def function(x):
        with data_dump("mine"):
            return x.sin() + 1

    wanted = lambda node: node if "sin" in node.name else None  # noqa: E731
    missing = reasons(function, torch.ones(3), path=dump_path, filter=wanted)
    assert missing == {"left out by the filter": 1}


def test_a_rank_is_a_reason(dump_path):
    with data_dump("mine", ranks=3, path=dump_path):
        torch.ones(2)
    assert only_row().missing == {"rank not selected": 1}


def test_a_branch_that_is_not_taken_did_not_run(dump_path):
    def true(x):
        with data_dump("mine"):
            return x.sin()

    def function(x):
        return torch.cond(x.sum() > 0, true, lambda x: x.cos(), (x,))

    assert reasons(function, -torch.ones(3), path=dump_path) == {"did not run": 1}


def test_an_operator_that_raises_is_a_reason(dump_path):
    with (
        pytest.raises(RuntimeError),
        data_dump("mine", path=dump_path),
    ):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    row = only_row()
    assert row.missing == {"raised an exception": 1}
    assert (row.tagged, row.dumped, row.calls) == (3, 2, 2)


def test_a_tensor_that_cannot_be_saved_is_listed_with_its_reason(dump_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with (
        pytest.warns(DumpWarning, match="a nested tensor has no single array"),
        data_dump("mine", path=dump_path),
    ):
        nested.sin()
    row = only_row()
    assert (row.tagged, row.dumped, sum(row.missing.values())) == (1, 0, 1)
    assert row.missing_tensors == {"a nested tensor has no single array": 2}
    (call,) = read(dump_path).ranks[0].calls
    assert [lost["slot"] for lost in call.record["missing"]] == ["INPUT.0", "OUTPUT.0"]


@pytest.mark.usefixtures("without_kernels")
def test_a_write_error_is_a_reason(dump_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchair_scope.store.saving.write_npy", full)
    with pytest.warns(DumpWarning, match="cannot write"), data_dump("mine", path=dump_path):
        torch.ones(2) + 1
    row = only_row()
    assert row.missing == {"write error": 2}
    assert set(row.missing_tensors) == {"No space left on device"}


def test_a_graph_break_is_named(dump_path):
    def function(x):
        with data_dump("mine"):
            x = x.sin()
            print("", end="")
            return x.cos()

    options = {"path": str(dump_path), "backend": "aot_eager"}
    with pytest.warns(DumpWarning, match="uncompiled"):
        torch.compile(function, backend="torchair_scope", options=options)(torch.ones(3))
    row = only_row()
    assert row.tagged == row.dumped == 2
    assert "print" in row.uncompiled


# --- scopes as a whole ---------------------------------------------------------------------------


def test_an_empty_scope_is_said_once_to_be_empty(dump_path):
    def function(x):
        with data_dump("none"):
            pass
        return x + 1

    compiled(function, dump_path)(torch.ones(2))
    with pytest.warns(DumpWarning, match=r"scope 'none' opened at .*: empty: there is no operator"):
        summary()
    summary()  # Warnings are errors: it is not said again.


def test_a_scope_with_operators_in_inner_scopes_only_is_not_empty(dump_path):
    with data_dump("outer", path=dump_path), data_dump("inner"):
        torch.ones(2)
    assert [row.remark for row in summary().rows] == [None, None]


def test_a_scope_of_which_nothing_is_saved_is_said_with_the_reason(dump_path):
    with data_dump("mine", steps=5, path=dump_path):
        torch.ones(2)
    with pytest.warns(DumpWarning, match="'mine'.*nothing of it is saved: step not selected"):
        summary()


def test_a_scope_that_another_backend_compiles_is_said():
    @torch.compile(backend="eager")
    def function(x):
        with data_dump("mine"):
            return x + 1

    function(torch.ones(2))
    with pytest.warns(DumpWarning, match="nothing of it came to a backend of torchair_scope"):
        summary()


def test_without_a_scope_there_is_nothing_to_say():
    assert summary().rows == []
    assert str(summary()) == "no scope was entered"


def test_the_table_has_a_line_for_each_scope_and_one_for_each_reason(dump_path):
    with data_dump("mine", ops="*add*", path=dump_path):
        torch.ones(2) + 1
    title, line, reason = str(summary()).splitlines()
    assert title.split() == [
        *("scope", "opened", "at", "tagged", "compiled", "dumped", "calls", "tensors", "bytes")
    ]
    assert line.split()[0] == "mine"
    assert line.split()[2:-1] == ["2", "2", "1", "1", "2"]
    assert reason == "    1 not dumped: not selected by ops"


# --- the end of the process ----------------------------------------------------------------------

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import torch, torchair_scope as torchair
with torchair.scope.data_dump("mine", path="dump"):
    x = torch.ones(3) + 1
{more}
"""


def run_script(more=""):
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(more=more)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    return finished.stderr


def test_the_manifest_has_the_account_and_nothing_is_printed_if_all_is_dumped():
    assert run_script() == ""
    (rank,) = read("dump").ranks
    (record,) = rank.account
    assert (record["scope"], record["tagged"], record["dumped"]) == ("mine", 2, 2)
    assert rank.problems == []
    lines = (rank.folder / "manifest.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == record


def test_the_account_is_printed_if_something_is_missing():
    printed = run_script('with torchair.scope.data_dump("none"): pass')
    assert "not all that lies in scopes is dumped" in printed
    assert "empty: there is no operator in it" in printed
    assert len(read("dump").ranks[0].account) == 2


def test_what_the_user_has_not_selected_is_no_news():
    more = 'with torchair.scope.data_dump("other", path="dump", steps=9): torch.ones(2)'
    assert run_script(more) == ""


def test_an_empty_scope_is_said_at_the_end_though_nobody_asks():
    more = (
        "from torchair_scope.scope import data_dump\n"
        "def empty(x):\n"
        "    with data_dump('none'): pass\n"
        "    return x\n"
        "options = {'path': 'dump', 'backend': 'aot_eager'}\n"
        "torch.compile(empty, backend='torchair_scope', options=options)(torch.ones(1) + 1)"
    )
    assert "empty: there is no operator in it" in run_script(more)


def test_a_summary_is_written_to_the_manifest_of_a_process_that_is_killed_later():
    run_script("torchair.scope.summary(); torch.zeros(1); import os; os._exit(0)")
    (record,) = read("dump").ranks[0].account
    assert (record["scope"], record["tagged"]) == ("mine", 2)


def test_a_dump_that_is_gone_is_not_made_again(tmp_path):
    assert run_script('import shutil; shutil.rmtree("dump")') == ""
    assert not (tmp_path / "dump").exists()


def test_the_public_names():
    assert torchair.scope.summary is summary
