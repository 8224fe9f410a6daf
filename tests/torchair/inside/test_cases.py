"""The cases of `tests/cases`: those that TorchAir compiles it also compiles with their scopes."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections import Counter

import pytest
import torch
import torchair
from torch.utils._pytree import tree_leaves, tree_map

import torchair_scope
from tests.cases import CASES, load
from tests.support.replay import assert_replays
from tests.support.running import run_once
from tests.torchair.setups import install
from torchair_scope.backends import patching
from torchair_scope.store.reader import read

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]

# The scope is outside of what is compiled, or a graph break lies in it: no graph has a tag.
LARGEST = 1 << 12
UNSEEN = ("case_34_graph_break_in_scope", "case_35_scope_around_compiled_call")
# TorchAir takes no DeviceMesh as an input of a GE graph, and copies the process group in it for an
# ACL graph, which fails or not by what has run before.
DTENSOR = ("case_39_dtensor",)
WARNS = ("case_19_dead_code_in_scope",)

# What plain TorchAir says to the cases that it does not compile.
NO_BODIES = {
    "case_11_scope_inside_cond_branch": "unhashable type: 'dict'",
    "case_13_shared_subgraph_second_call_scoped": "unhashable type: 'dict'",
}
REFUSED = {
    "max-autotune": {
        "case_04_optional_index_list": "aten.index_put.default ge_converter is not implemented",
        "case_05_namedtuple_results": "Failed to auto-generated converter for aten.frexp.Tensor",
        "case_08_kv_cache_buffer": "aten.index_copy.default ge_converter is not implemented",
        "case_10_mutating_custom_op": "Failed to load GetRegisteredIrDef from libge_runner.so",
        "case_11_scope_inside_cond_branch": "Failed to auto-generated converter for cond",
        "case_13_shared_subgraph_second_call_scoped": "converter for invoke_subgraph",
        "case_29_very_long_op_name": "Failed to load GetRegisteredIrDef from libge_runner.so",
    },
    "npugraph_ex": NO_BODIES,
}
# Of these, what differs between tensors on a CPU and those on an NPU.
REFUSED_ON_CPU = {
    "case_02_sdpa_kwargs_mask": "_scaled_dot_product_flash_attention_for_cpu",
    "case_28_rng_in_and_out_of_scope": "default_generators|CPU Generator does not use offset",
}
REFUSED_ON_NPU = {
    "case_18_cse_merges_scope_away": "matmul_backward currently only support mask",
}
# Refused for an operator in the scope: with the scope, all the others are compiled.
RESCUED = (
    "case_04_optional_index_list",
    "case_05_namedtuple_results",
    "case_08_kv_cache_buffer",
    "case_10_mutating_custom_op",
    "case_29_very_long_op_name",
)


# Kernels for the NPU's device key take these apart before any compiler sees them.
ON_NPU = {"scaled_dot_product": "_safe_softmax", "aten.mm": "aten.matmul"}


def refusals(mode, device):
    refused = REFUSED[mode]
    if mode == "max-autotune":
        refused = refused | (REFUSED_ON_CPU if device == "cpu" else REFUSED_ON_NPU)
    return refused


def pytest_generate_tests(metafunc):
    """A test that takes `name` and `case_mode` runs for each case, or for each that is refused."""
    if "case_mode" not in metafunc.fixturenames:
        return
    setup = install.CURRENT
    modes = [mode for mode in setup.modes if mode in REFUSED]
    wants_refused = "refused" in metafunc.function.__name__
    pairs = [
        (name, mode)
        for mode in modes
        for name in CASES
        if name not in (*UNSEEN, *DTENSOR)
        and (name in refusals(mode, setup.device)) == wants_refused
    ]
    metafunc.parametrize(("name", "case_mode"), pairs, scope="module")


def on(device, value):
    """Inputs on the device; what is no plain tensor stays."""

    def move(leaf):
        if type(leaf) is not torch.Tensor:
            return leaf
        # What a case is about does not depend on its size.
        shorter = leaf[:LARGEST] if leaf.dim() else leaf
        return shorter.detach().clone().to(device).requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def moved(case, device):
    """The case with what it makes on the device, compiled as one function."""
    names = {name: value for name, value in vars(case).items() if name != "parts"}
    names["make"] = lambda data_dump: tuple(on(device, part) for part in case.make(data_dump))
    if hasattr(case, "more_inputs"):
        names["more_inputs"] = lambda: [on(device, inputs) for inputs in case.more_inputs()]
    return types.SimpleNamespace(**names)


def run(name, device, data_dump, backend):
    # Modules, and what a case makes inside its function, belong on the device as well. A batch norm
    # that is moved there would get a format that only a real NPU has.
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        return run_once(moved(load(name), device), data_dump, 2, backend=backend)


def backend(mode, path="."):
    config = install.CURRENT.compiler_config(mode)
    config.debug.data_dump.path = str(path)
    # Outputs of an earlier call are looked at later, when their memory has other contents.
    config.debug.aclgraph.enable_output_clone = mode != "max-autotune"
    return torchair.get_npu_backend(compiler_config=config)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """`ran(name, mode)`: the case without its scopes, with them, and the dump of that."""

    @functools.cache
    def both(name, mode):
        device, path = install.CURRENT.device, tmp_path_factory.mktemp(name)
        install.reset()
        reference = run(name, device, contextlib.nullcontext, backend(mode))
        install.reset()
        patching.patch()
        try:
            result = run(name, device, torchair_scope.scope.data_dump, backend(mode, path))
        finally:
            torchair_scope.unpatch()
        return result, reference, read(path)

    return both


def plain(values):
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {key: value.detach().cpu() for key, value in pairs if value is not None}


def test_the_results_are_those_without_a_scope(ran, name, case_mode):
    result, reference, _ = ran(name, case_mode)
    for fact in ("values", "gradients", "state"):
        actual, expected = plain(getattr(result, fact)), plain(getattr(reference, fact))
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_the_dump_holds_what_the_case_asks_for(ran, name, case_mode):
    case = load(name)
    result, reference, dump = ran(name, case_mode)
    assert dump.problems == []
    (rank,) = dump.ranks
    targets = Counter(call.target for call in rank.calls if call.step == 0)

    def count(part):
        return sum(number for target, number in targets.items() if part in target)

    other = ON_NPU if install.CURRENT.device == "npu" else {}
    assert all(count(other.get(part, part)) for part in case.MUST), targets
    assert not any(count(part) for part in getattr(case, "MUST_NOT", []))
    asked = getattr(case, "COUNT", {})
    assert {part: count(part) for part in asked} == asked
    for part, number in getattr(case, "COUNT_MIN", {}).items():
        assert count(part) >= number
    for part, number in getattr(case, "N_INPUT_TENSORS", {}).items():
        for call in rank.calls:
            tensors = [leaf for leaf in tree_leaves(call.load_args()) if torch.is_tensor(leaf)]
            assert part not in call.target or len(tensors) == number
    if name not in WARNS:
        texts = [{str(warning.message) for warning in one.warnings} for one in (result, reference)]
        assert not [text for text in texts[0] - texts[1] if "scope" in text]


def test_every_call_gives_its_dumped_outputs_again(ran, name, case_mode):
    _, _, dump = ran(name, case_mode)
    verdicts = assert_replays(dump)
    if not getattr(load(name), "RANDOM", False):
        assert {verdict.kind for verdict in verdicts} == {"equal"}


def test_a_case_that_torchair_refused_is_refused_with_its_own_error(name, case_mode, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=refusals(case_mode, device)[name]):
            run(name, device, contextlib.nullcontext, backend(case_mode))


@pytest.mark.parametrize("name", RESCUED)
def test_what_torchair_does_not_convert_is_dumped_and_the_rest_is_compiled(
    patched, device, name, tmp_path
):
    result = run(name, device, torchair_scope.scope.data_dump, backend("max-autotune", tmp_path))
    install.reset()
    reference = run(name, device, contextlib.nullcontext, "eager")
    torch.testing.assert_close(plain(result.values), plain(reference.values), equal_nan=True)
    dump = read(tmp_path)
    targets = {call.target for call in dump.ranks[0].calls}
    assert all(any(part in target for target in targets) for part in load(name).MUST)
    assert_replays(dump)
    assert dump.problems == []


@pytest.mark.parametrize("name", NO_BODIES)
def test_a_control_flow_operator_runs_uncompiled_where_torchair_takes_none(
    patched, device, name, tmp_path, mode
):
    result = run(name, device, torchair_scope.scope.data_dump, backend(mode, tmp_path))
    install.reset()
    reference = run(name, device, contextlib.nullcontext, "eager")
    torch.testing.assert_close(plain(result.values), plain(reference.values))
