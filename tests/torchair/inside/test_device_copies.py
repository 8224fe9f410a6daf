"""Saved values leave the device in the order of its stream; the model does not wait for them."""

import threading

import pytest
import torch

import torchair_scope
from torchair_scope.store.reader import read

pytestmark = [pytest.mark.only_in("C"), pytest.mark.usefixtures("patched")]


@pytest.fixture
def waits(monkeypatch):
    """How often the host has waited for the whole device."""
    times = []
    own = torch.npu.synchronize

    def synchronize(device=None):
        times.append(device)
        return own(device)

    monkeypatch.setattr(torch.npu, "synchronize", synchronize)
    return times


@pytest.fixture
def arrivals(monkeypatch):
    """The threads that have waited for an event."""
    threads = []
    own = torch.npu.Event.synchronize

    def synchronize(event):
        threads.append(threading.current_thread())
        return own(event)

    monkeypatch.setattr(torch.npu.Event, "synchronize", synchronize)
    yield threads
    assert threading.main_thread() not in threads


def compile_scoped(torchair, config, path):
    config.debug.data_dump.path = str(path)

    def function(x):
        x = x * 2
        with torchair_scope.scope.data_dump("chain"):
            for _ in range(5):
                x = x + 1
        return x * 3

    return torch.compile(function, backend=torchair.get_npu_backend(compiler_config=config))


def test_the_model_waits_for_no_device_and_writers_for_each_copy(
    torchair, compiler_config, waits, arrivals, tmp_path
):
    function = compile_scoped(torchair, compiler_config(), tmp_path)
    for _ in range(3):
        function(torch.ones(4, device="npu"))
    assert waits == []
    assert len(arrivals) == 3 * 6  # of each value once
    (rank,) = read(tmp_path).ranks
    assert [step["complete"] for step in rank.steps] == [True] * 3
    values = [call.load_outputs(device="cpu")[0].item() for call in rank.calls if call.step == 2]
    assert values == [3, 4, 5, 6, 7]


def test_the_record_says_which_internal_format_a_tensor_had(torchair, compiler_config, tmp_path):
    compile_scoped(torchair, compiler_config(), tmp_path)(torch.ones(4, device="npu"))
    (rank,) = read(tmp_path).ranks
    assert isinstance(rank.calls[0].record["outputs"]["tensor"]["npu_format"], int)


def test_copies_go_to_the_host_where_the_npu_is_the_default_device(
    torchair, compiler_config, tmp_path
):
    with torch.device("npu"):
        compile_scoped(torchair, compiler_config(), tmp_path)(torch.ones(4))
        dump = read(tmp_path)
        assert dump.problems == []
        assert dump.ranks[0].calls[-1].load_outputs("cpu").tolist() == [7.0] * 4


def test_an_internal_format_is_recorded_and_the_file_has_the_logical_layout(
    torchair, compiler_config, tmp_path, monkeypatch
):
    import torch_npu

    fractal_nz = 29
    monkeypatch.setattr(torch_npu, "get_npu_format", lambda tensor: fractal_nz)
    compile_scoped(torchair, compiler_config(), tmp_path)(torch.ones(3, 5, device="npu"))
    (rank,) = read(tmp_path).ranks
    recorded = rank.calls[0].record["outputs"]["tensor"]
    assert (recorded["npu_format"], recorded["shape"]) == (fractal_nz, [3, 5])
    assert rank.calls[0].load_outputs("cpu").tolist() == [[3.0] * 5] * 3
