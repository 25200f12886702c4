"""Outputs that modules deep in a model collect beside its forward: by hooks of transformers, or own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import counterflow as cf

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return transformers.MixtralForCausalLM(config)


def qwen() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, output_router_logits=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def hidden_states() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, output_hidden_states=True))


def attentions() -> Any:
    config = transformers.LlamaConfig(**SIZES, output_attentions=True, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


_COLLECTED: ContextVar[list[Tensor]] = ContextVar("collected")


class Noting(nn.Module):
    """A layer that leaves a tensor where its model finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        _COLLECTED.get().append(y)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noting, self.out = Noting(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(self.noting(x))
        return y


class Collecting(nn.Module):
    """A model that adds up what its layers' layers have left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        token = _COLLECTED.set([])
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        collected = torch.stack(_COLLECTED.get()).square().mean()
        _COLLECTED.reset(token)
        return {"x": x, "loss": collected + labels.sum() * 0.0}


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "router logits": (mixtral, 6),
    "router logits, qwen": (qwen, 6),
    "hidden states": (hidden_states, 6),
    "attentions": (attentions, 6),
    "own": (Collecting, 4),
}


@pytest.mark.parametrize("forwards", [0, 1])
@pytest.mark.parametrize("kind", MODELS)
def test_collected_outputs_are_the_models(kind: str, forwards: int) -> None:
    """Before and after the model's first forward, which registers transformers' hooks."""
    make, count = MODELS[kind]
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(0, 61, (4, 7))
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(forwards):
        model(**batch)
    layers = cf.layers(model, batch)
    assert len(layers) >= count
    expected = model(**batch)
    wanted = torch.autograd.grad(expected["loss"], list(model.parameters()), allow_unused=True)
    value: Any = batch
    for layer in layers:
        value = layer(value)
    gradients = torch.autograd.grad(value["loss"], list(model.parameters()), allow_unused=True)
    assert value.keys() == expected.keys()
    for mine, whole in zip(pytree.tree_leaves(dict(value)), pytree.tree_leaves(dict(expected)), strict=True):
        torch.testing.assert_close(mine, whole)
    for gradient, want in zip(gradients, wanted, strict=True):
        if want is not None:
            torch.testing.assert_close(gradient, want)


def test_hooks_of_users_are_not_called_by_recordings() -> None:
    model, calls = mixtral().train(), []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 61, (4, 7))
    assert len(cf.layers(model, {"input_ids": ids, "labels": ids})) > 6
    assert not calls


def segformer() -> Any:
    """A model whose forward asks a part of itself for hidden states."""
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
        drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def square(output: Any, targets: Tensor) -> Tensor:
    return torch.square(output.logits - targets).mean()


def losses_of_pipeline(model: Any, images: Tensor, targets: Tensor) -> list[float]:
    example = {"pixel_values": images}
    pipeline = cf.Pipeline(
        model, square, "gpipe(stages=1, micro_batches=2)", example=example, optimizer=torch.optim.SGD
    )
    losses = [pipeline.step(example, targets).loss for _ in range(2)]
    pipeline.close()
    return losses


def test_hooks_are_registered_once_beside_the_first_comparison() -> None:
    torch.manual_seed(0)
    model = segformer()
    plain = copy.deepcopy(model)
    images, targets = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 8, 8)
    losses = cf.launch(losses_of_pipeline, model, images, targets, workers=1, transport="local")[0]
    optimizer = torch.optim.SGD(plain.parameters())
    for loss in losses:
        parts = []
        for part, target in zip(images.split(2), targets.split(2), strict=True):  # statistics of a half
            parts.append(square(plain(part), target) / 2)
            parts[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
