"""One layer of each of twenty model architectures, tiny and with random weights, is dumped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair_scope as torchair
from tests.support.account import assert_adds_up, rows
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.store.reader import read

pytestmark = pytest.mark.slow

WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
ENCODER = {**WIDTH, "vocab_size": 64, "intermediate_size": 32, "max_position_embeddings": 32}
DECODER = {**ENCODER, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
IMAGES = {**WIDTH, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
WAVES = {
    **ENCODER,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
TWO_STACKS = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32},
}


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(1, 9)[None]}


def tokens_and_targets() -> dict[str, torch.Tensor]:
    return {**tokens(), "decoder_input_ids": torch.arange(3, 7)[None]}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 16, 16)}


def wave() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(1, 200)}


def spectrum() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(1, 24, 16)}


def spectrum_and_targets() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(1, 8, 16), "decoder_input_ids": torch.arange(3, 7)[None]}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, the layer that is dumped, and an operator of that layer."""

    name: str
    layer: str
    operator: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]] = tokens


ARCHITECTURES = [
    # encoders
    Architecture("bert", "encoder.layer.1", "gelu", ENCODER),
    Architecture(
        "distilbert",
        "transformer.layer.1",
        "gelu",
        {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32, "vocab_size": 64},
    ),
    Architecture(
        "deberta-v2",
        "encoder.layer.1",
        "gelu",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    Architecture("modernbert", "layers.1", "gelu", {**ENCODER, "pad_token_id": 0}),
    # decoders
    Architecture(
        "gpt2", "h.1", "tanh", {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 64}
    ),
    Architecture("llama", "layers.1", "silu", DECODER),
    Architecture("gemma2", "layers.1", "gelu", DECODER),
    Architecture("gpt_neox", "layers.1", "gelu", ENCODER),
    Architecture("falcon", "h.1", "gelu", ENCODER),
    # encoder-decoders
    Architecture(
        "t5",
        "decoder.block.0",
        "relu",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64},
        tokens_and_targets,
    ),
    Architecture("bart", "decoder.layers.0", "gelu", TWO_STACKS, tokens_and_targets),
    # mixtures of experts
    Architecture("mixtral", "layers.1", "topk", {**DECODER, "num_local_experts": 4, **EXPERTS}),
    Architecture(
        "qwen2_moe",
        "layers.1",
        "topk",
        {**DECODER, "num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS},
    ),
    # state spaces
    Architecture(
        "mamba",
        "layers.1",
        "convolution",
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 64},
    ),
    Architecture(
        "mamba2",
        "layers.1",
        "convolution",
        {
            **{"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 64},
            **{"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        },
    ),
    # vision
    Architecture("vit", "layers.1", "gelu", IMAGES, images),
    Architecture(
        "convnext",
        "encoder.stages.1",
        "convolution",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        images,
    ),
    Architecture(
        "swin",
        "encoder.layers.1",
        "roll",
        {
            **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2]},
            **{"num_heads": [2, 2], "window_size": 2},
        },
        images,
    ),
    # audio
    Architecture("wav2vec2", "encoder.layers.1", "gelu", WAVES, wave),
    Architecture(
        "whisper",
        "encoder.layers.0",
        "gelu",
        {**TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8},
        spectrum_and_targets,
    ),
]
SMALL_ONES = ["bert", "llama", "vit"]
# Layers that compute what nothing uses, and a part of the line that does.
DEAD_CODE = {"mamba": "associative_scan(", "swin": "spatial_state.view("}


def params(names: list[str] | None = None) -> Any:
    chosen = [one for one in ARCHITECTURES if names is None or one.name in names]
    return pytest.mark.parametrize("architecture", chosen, ids=lambda one: one.name)


@params()
def test_with_aot_eager_the_result_is_unchanged_and_every_call_replays(architecture, dump_path):
    expected, actual = run(architecture, "aot_eager", dump_path)
    assert difference(actual, expected) is None
    check_dump(architecture, dump_path)


@params(SMALL_ONES)
def test_with_inductor_the_result_is_unchanged_and_every_call_replays(architecture, dump_path):
    expected, actual = run(architecture, "inductor", dump_path)
    torch.testing.assert_close(actual, expected)
    check_dump(architecture, dump_path)


def check_dump(architecture: Architecture, path: Path) -> None:
    (rank,) = read(path).ranks
    assert rank.problems == []
    assert_adds_up(rows(), read(path))
    assert {call.scope.split("/")[0] for call in rank.calls} == {"layer"}
    assert any(architecture.operator in call.target for call in rank.calls)
    assert {each.verdict for each in torchair.replay(path)} <= {"rounding", "cannot"}
    verdicts = zip(rank.calls, assert_replays(read(path)), strict=True)
    skipped = {call.target for call, verdict in verdicts if verdict.kind == "skipped"}
    assert all(target.startswith("aten.empty") for target in skipped)


def run(architecture: Architecture, inner: str, path: Path) -> tuple[list, list]:
    """The results without a scope, and with one; a scope warns of dead code alone."""
    torch.manual_seed(0)
    model, inputs = model_of(architecture), architecture.inputs()
    expected, warned = called(model, inputs, backend=inner)
    torch._dynamo.reset()
    torchair.dump_ops(model.get_submodule(architecture.layer), name="layer")
    options = {"path": str(path), "backend": inner}
    actual, warned_with_scope = called(model, inputs, backend="torchair_scope", options=options)
    dead_code = DEAD_CODE.get(architecture.name)
    for text in warned_with_scope - warned:
        assert dead_code is not None, text
        assert "removed as dead code" in text
        assert dead_code in text
    return expected, actual


def model_of(architecture: Architecture) -> torch.nn.Module:
    import transformers  # takes seconds, which only these tests should

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(architecture.name, **architecture.config)
        config.use_cache = False
        return transformers.AutoModel.from_config(config).eval()


def called(model: torch.nn.Module, inputs: dict, **backend: Any) -> tuple[list, set[str]]:
    """What a compiled model returns, and the warnings that it gives."""
    compiled = torch.compile(model, fullgraph=True, **backend)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        results = list(compiled(**inputs).to_tuple())
    return results, {str(warning.message) for warning in caught}
