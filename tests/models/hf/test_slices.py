"""Models of transformers in slices of their sequence: one process's numbers, and what is refused."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import counterflow as cf
from counterflow.models import hf
from counterflow.schedule.registry import schedule_of
from counterflow.verification.agreement import Agreement, verify

from . import tiny

SEQ1F1B = "1f1b(stages=2, micro_batches=2, slices=3)"
TOLERANCES = {"gemma": 1e-6, "gemma3": 1e-6}
"""Of those whose norms compute in float32."""


def _batch(positions: int = 13) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, tiny.VOCABULARY, (4, positions))
    labels = ids.clone()
    labels[:, 8:][torch.rand(4, positions - 8) < 0.5] = -100
    return ids, labels


def _agreement(model: nn.Module, scheme: str = SEQ1F1B, *, steps: int = 2, **options: Any) -> Agreement:
    torch.manual_seed(0)
    batches = [[_batch()] for _ in range(steps)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    layers = hf.layers(model.double())
    return verify(schedule_of(scheme, {}), layers, hf.loss, batches, optimizer=optimizer, **options)


def _phi() -> nn.Module:
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "initializer_range"}
    config = tf.PhiConfig(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    found: nn.Module = tf.PhiForCausalLM(config).train()
    return found


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "gemma", "gemma3", "granite"],
)
def test_decoders_train_as_one_process(name: str) -> None:
    """Mistral, Qwen 2 and Gemma 3 with a window of less than a slice."""
    for scheme in (SEQ1F1B, "zb-h1(stages=2, micro_batches=2, slices=2)"):
        found = _agreement(tiny.made(name), scheme)
        errors = found.loss_error, found.norm_error, found.gradient_error, found.weight_error
        assert max(errors) < TOLERANCES.get(name, 1e-10), (scheme, found)


class _Double:
    """As torch, for modules that compute in float32 whatever their model's dtype."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_recurrent_layers_train_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's compute in float32; with float64 in its place the states' gradients are exact."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    single = "1f1b(stages=2, micro_batches=1, slices=9)"  # of one position some
    for name, scheme, options in (
        ("mamba", SEQ1F1B, {"recompute": "layer"}),
        ("mamba2", SEQ1F1B, {"recompute": "stage"}),
        ("mamba", "zb-h1(stages=2, micro_batches=2, slices=2)", {}),
        ("mamba2", "chimera(stages=2, micro_batches=2, slices=2)", {}),
        ("mamba2", single, {}),
        ("falcon-mamba", single, {}),
    ):
        model = tiny.made(name)
        monkeypatch.setattr(sys.modules[type(model).__module__], "torch", _Double())
        assert _agreement(model, scheme, steps=1, **options).ok, (name, scheme, options)


def test_recurrent_layers_as_they_are() -> None:
    found = _agreement(tiny.made("mamba2"))
    assert max(found.loss_error, found.norm_error, found.gradient_error, found.weight_error) < 5e-6, found


def test_phi_and_adapters_train_as_one_process() -> None:
    assert _agreement(_phi()).ok
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny.made("llama"), config)
    for scheme in (SEQ1F1B, "zb-h1(stages=2, micro_batches=2, slices=2)"):
        assert _agreement(adapted, scheme).ok, scheme


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("bert", "layers of kind every_layer have masks that are neither causal nor causal within a window"),
        ("llama-eager", "calls transformers' attention 'sdpa' 0 times, and slices need one call; load the"),
        ("gemma2", "calls transformers' attention 'sdpa' 0 times"),
        ("olmo-hybrid", "a OlmoHybridLinearAttentionDecoderLayer does not scan as Mamba's layers do"),
        ("opt", r"layer 0 \(_First\) of stage 0 makes something else of a whole sequence"),
    ],
)
def test_other_attention_is_refused(name: str, match: str) -> None:
    with pytest.raises(cf.ConfigError, match=match):
        _agreement(tiny.made(name))


def _padded(name: str) -> None:
    model = tiny.made("llama")
    pipeline = cf.Pipeline(
        model, hf.loss, SEQ1F1B, list_layers=hf.layers, optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    ids, labels = _batch()
    beside = torch.ones_like(ids) if name == "attention_mask" else torch.arange(13).expand(4, -1)
    evaluated = pipeline.evaluate({"input_ids": ids, name: beside}, labels)
    assert evaluated.loss > 0
    pipeline.step({"input_ids": ids, name: beside}, labels)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_masks_and_positions_of_the_users_are_refused(name: str) -> None:
    with pytest.raises(cf.ConfigError, match=f"{name} is among the inputs, and slices see all earlier ones"):
        cf.launch(_padded, name, workers=2, transport="local")


def _evaluations() -> list[float]:
    torch.manual_seed(0)
    model = tiny.made("mistral").double()
    pipeline = cf.Pipeline(
        model, hf.loss, SEQ1F1B, list_layers=hf.layers, optimizer=partial(torch.optim.SGD, lr=0.0)
    )
    ids, labels = _batch()
    found = [pipeline.evaluate(ids, labels).loss]
    found.append(pipeline.step(ids, labels).loss)
    mask = torch.ones_like(ids)
    return [
        *found,
        pipeline.evaluate(ids, labels).loss,
        pipeline.evaluate({"input_ids": ids, "attention_mask": mask}, labels).loss,
    ]


def test_evaluations_before_and_after_are_the_same() -> None:
    found = cf.launch(_evaluations, workers=2, transport="local")[0]
    assert found == pytest.approx([found[0]] * 4, rel=1e-10)
