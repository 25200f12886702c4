"""Experts of a layer as a profile has them, from its modules on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterflow.measure.routed_experts import experts_of
from counterflow.models.gpt import GPTConfig

SHAPE = GPTConfig(layers=1, hidden=8, heads=2, vocabulary=16, positions=4, experts=4)


def test_experts_of_the_built_in_gpt() -> None:
    with torch.device("meta"):
        embedding, block, _ = SHAPE.build()
    experts = experts_of(block, 128.0)
    assert experts is not None
    # Two matrices of 8 by 32 an expert; a token passes two experts, and 4 · 8 · 8 + 4 · 8 other weights.
    assert (experts.count, experts.weights_bytes) == (4, 4 * 2 * 256 * 4)
    assert experts.forward == experts.backward == 1024 / (1024 + 256 + 32)
    assert (experts.sent_bytes, experts.load) == (2 * 128.0, 1.0)
    assert experts_of(embedding, 128.0) is None


def test_a_layer_that_says_not_how_many_a_token_passes_has_none() -> None:
    layer = nn.Linear(4, 4)
    layer.expert_parameters = ("weight",)  # type: ignore[assignment]
    assert experts_of(layer, 16.0) is None
    layer.top_k = 2  # type: ignore[assignment]
    experts = experts_of(layer, 16.0)
    assert experts is not None
    assert (experts.count, experts.weights_bytes, experts.forward, experts.sent_bytes) == (4, 64.0, 1.0, 32.0)


def test_experts_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        config = transformers.MixtralConfig(**sizes, vocab_size=16, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    experts = experts_of(model.model.layers[0], 100.0)
    assert experts is not None
    assert (experts.count, experts.weights_bytes, experts.sent_bytes) == (4, 4 * 3 * 128 * 4, 200.0)
