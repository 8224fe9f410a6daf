"""What crosses the border of a scope: layouts, symbols, parameters, views, written memory."""

from __future__ import annotations

import pytest
import torch
import torchair
import torchair.npu_fx_compiler

from tests.support.replay import assert_replays
from tests.torchair.inside.models import assert_same

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]


def scoped(function):
    """`function` in a scope of its own."""

    def call(*args):
        with torchair.scope.data_dump():
            return function(*args)

    return call


LAYOUTS = {
    "transposed": (lambda x: torch.relu(x.t()), lambda y: y.t() * 2),
    "permuted": (lambda x: torch.relu(x.view(2, 3, 2).permute(2, 0, 1)), lambda y: y.flatten() * 2),
    "channels_last": (
        lambda x: torch.relu(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last)),
        lambda y: y.permute(0, 2, 3, 1) + 1,
    ),
    "expanded": (lambda x: torch.relu(x[:1]).expand(3, 4), lambda y: y.reshape(-1) + 1),
    "sliced": (lambda x: torch.relu(x)[:, 1:3], lambda y: y.t() * 2),
    "strided": (lambda x: torch.relu(x)[::2], lambda y: y.as_strided((2, 2), (1, 2)) * 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", ["producer", "reader"])
def test_a_value_in_another_layout_crosses_a_border_with_its_strides(
    compile_with, dump_config, device, read_dump, layout, inside, mode
):
    make, use = LAYOUTS[layout]
    x = torch.arange(12.0).view(3, 4) - 5
    expected = use(make(x))
    if inside == "producer":
        make = scoped(make)
    else:
        use = scoped(use)
    result = compile_with(dump_config(mode), lambda x: use(make(x)))(x.to(device))
    assert_same(result, expected)
    dump = read_dump()
    assert dump.problems == []
    assert_replays(dump)


def test_a_view_that_a_later_part_computes_from_traced_strides_is_right(
    compile_with, dump_config, device
):
    def model(x, y):
        z = torch.relu(x.t())
        w = scoped(torch.tanh)(y)
        return z.t() + w, z.t().reshape(-1)

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    run = compile_with(dump_config(), model)
    summed, flat = run(x.to(device), y.to(device))
    assert_same(summed, torch.relu(x) + torch.tanh(y))
    assert_same(flat, torch.relu(x).reshape(-1))


def test_symbols_reach_parts_that_use_them_in_no_argument(
    compile_with, dump_config, device, read_dump, mode
):
    def model(x, y):
        rows, columns = x.shape
        a = torch.relu(x).reshape(rows * columns)
        b = scoped(lambda a: a + rows)(a)
        return b.view(columns, rows) * y.shape[0], torch.sigmoid(y)

    run = compile_with(dump_config(mode), model, dynamic=True)
    for rows, columns, others in ((3, 5, 7), (4, 6, 8), (7, 4, 9)):
        x, y = torch.randn(rows, columns), torch.randn(others, 11)
        product, passed = run(x.to(device), y.to(device))
        assert_same(product, (torch.relu(x).reshape(-1) + rows).view(columns, rows) * others)
        assert_same(passed, torch.sigmoid(y))
    (rank,) = read_dump().ranks
    assert len(rank.graphs) == 1
    assert [call.load_outputs("cpu").numel() for call in rank.calls] == [15, 24, 28]


def test_parameters_keep_their_mark_and_are_not_copied_at_each_replay(
    compile_with, dump_config, device, monkeypatch, mode
):
    if mode == "max-autotune":
        pytest.skip("copies no parameter")
    from torchair._acl_concrete_graph.acl_graph import AclGraph

    marked, copied = [], []
    own = AclGraph.compile

    def watch(self, *args, **kwargs):
        marked.append(self._parameter_user_inputs)
        copied.append(len(args) - len(self._parameter_user_inputs))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(AclGraph, "compile", watch)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    torchair.scope.dump_ops(net[1])
    net.to(device)
    with torch.no_grad():
        compile_with(dump_config(mode), net)(torch.randn(3, 4).to(device))
    # Weights and biases; a transposed weight is one as well, in whichever part it is taken.
    assert sum(map(len, marked)) >= 4
    assert copied == [1, 1]


def test_a_part_of_views_only_is_no_graph_of_its_own(
    compile_with, dump_config, device, recorder, read_dump, mode
):
    def model(x):
        y = scoped(torch.tanh)(x)
        y = y.t().unsqueeze(0)
        return scoped(torch.sin)(y)

    x = torch.randn(3, 4)
    assert_same(compile_with(dump_config(mode), model)(x.to(device)), torch.tanh(x).t().sin()[None])
    assert recorder.ge_graphs == []
    assert not any(graph.captured_ops() for graph in recorder.acl_graphs)
    (rank,) = read_dump().ranks
    assert rank.graphs[0]["regions"].count("dumped") == 2


def test_the_values_saved_of_a_captured_graph_are_those_of_the_step(
    compile_with, dump_config, device, read_dump, mode
):
    def model(x):
        y = torch.relu(x) + 1
        y = scoped(lambda y: y * 2)(y)
        return torch.sigmoid(y)

    run = compile_with(dump_config(mode), model)
    inputs = [torch.randn(3, 4) for _ in range(4)]
    for x in inputs:
        run(x.to(device))
    dumped = [call.load_args("cpu")[0][0] for call in read_dump().ranks[0].calls]
    for saved, x in zip(dumped, inputs, strict=True):
        assert_same(saved, torch.relu(x) + 1)


def test_an_argument_of_an_earlier_step_is_not_written_to(compile_with, dump_config, device, mode):
    def model(x):
        y = scoped(torch.tanh)(x)
        return torch.relu(x) + y

    run = compile_with(dump_config(mode), model)
    inputs = [torch.randn(3, 4).to(device) for _ in range(3)]
    before = [x.cpu().clone() for x in inputs]
    for x in inputs:
        run(x)
    for x, value in zip(inputs, before, strict=True):
        assert torch.equal(x.cpu(), value)


class Cache(torch.nn.Module):
    """A KV cache that is written in the scope, and outside of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kv", torch.zeros(2, 6, 4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, position):
        with torchair.scope.data_dump("write"):
            self.kv.index_copy_(1, position, x)
            keys = self.kv[:, :3] + 0
        self.kv.mul_(2)
        self.steps.add_(1)
        return keys.sum(-1)


def test_buffers_written_in_and_outside_a_scope_are_right_after_each_step(
    compile_with, dump_config, device, read_dump, mode
):
    net = Cache().to(device)
    run = compile_with(dump_config(mode), net)
    kv = torch.zeros(2, 6, 4)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(2, 1, 4)
            kv[:, step % 3] = x[:, 0]
            assert_same(run(x.to(device), torch.tensor([step % 3]).to(device)), kv[:, :3].sum(-1))
            kv *= 2
            assert_same(net.kv, kv)
            assert int(net.steps) == step + 1
    dump = read_dump()
    assert dump.problems == []
    assert_replays(dump)


def test_an_input_that_is_written_to_has_its_new_value_after_the_call(
    compile_with, dump_config, device, mode
):
    def model(x, y):
        x.add_(1)
        z = scoped(lambda x: x * y)(x)
        x.mul_(z)
        return z.sum()

    run = compile_with(dump_config(mode), model)
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        on_device = x.clone().to(device)
        with torch.no_grad():
            total = run(on_device, y.to(device))
        assert_same(total, ((x + 1) * y).sum())
        assert_same(on_device, (x + 1) * (x + 1) * y)


def test_inputs_that_share_memory_give_the_results_of_eager(
    compile_with, dump_config, device, mode
):
    def model(x, row):
        y = scoped(torch.tanh)(x)
        row.add_(1)
        return x.sum() + y.sum()

    run = compile_with(dump_config(mode), model)
    base = torch.randn(3, 4)
    on_device = base.clone().to(device)
    with torch.no_grad():
        total = run(on_device, on_device[0])
    expected = base.clone()
    expected[0] += 1
    assert_same(on_device, expected)
    assert_same(total, expected.sum() + torch.tanh(base).sum())


def test_a_graph_that_returns_an_input_and_a_view_of_it_returns_their_values(
    compile_with, dump_config, device, mode
):
    def model(x):
        y = scoped(torch.tanh)(x)
        return x.t(), torch.relu(y), y.t()

    run = compile_with(dump_config(mode), model)
    for _ in range(2):
        x = torch.randn(3, 4)
        turned, positive, other = run(x.to(device))
        assert_same(turned, x.t())
        assert_same(positive, torch.relu(torch.tanh(x)))
        assert_same(other, torch.tanh(x).t())


def test_geared_dimensions_stay_geared_in_a_part_that_takes_the_input(
    compile_with, dump_config, device, recorder, read_dump
):
    from torchair.inference import set_dim_gears

    def model(x):
        y = torch.relu(x)
        y = scoped(torch.tanh)(y)
        return torch.sigmoid(y)

    run = compile_with(dump_config(), model, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 4)
        on_device = x.to(device)
        set_dim_gears(on_device, {0: [3, 5]})
        assert_same(run(on_device), torch.sigmoid(torch.tanh(torch.relu(x))))
    first = recorder.ge_graphs[0]
    assert first.options.get("ge.dynamicDims") == "3;5"
    assert [call.step for call in read_dump().ranks[0].calls] == [0, 1]
