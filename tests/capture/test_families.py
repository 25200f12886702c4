"""Models of transformers, whose layers are found automatically: in both modes, for other sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import counterflow as cf
from counterflow.models import hf
from counterflow.runtime.stages.carrying import add_carries

from ..models.hf import tiny
from .sequences import compare, in_slices

Made = tuple[nn.Module, Callable[[int, int], Any]]


def ids(samples: int, length: int) -> Tensor:
    return torch.randint(3, 60, (samples, length), generator=torch.Generator().manual_seed(samples))


def image(size: int) -> Callable[[int, int], Tensor]:
    return lambda samples, _: torch.randn(
        samples, 3, size, size, generator=torch.Generator().manual_seed(samples)
    )


SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT: dict[str, Any] = SMALL | {"vocab_size": 64, "num_hidden_layers": 2}
PAIR: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def text(samples: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[0, -2:] = 0
    return {"input_ids": ids(samples, length), "attention_mask": mask}


def pair(samples: int, length: int) -> dict[str, Tensor]:
    return {**text(samples, length), "decoder_input_ids": ids(samples, length - 2)}


def speech(samples: int, length: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(samples)
    features = torch.randn(samples, 8, 32, generator=draw)
    return {"input_features": features, "decoder_input_ids": ids(samples, length)}


T: Any = transformers
FAMILIES: dict[str, Callable[[], Made]] = {
    "llama": lambda: (T.LlamaForCausalLM(T.LlamaConfig(**TEXT)), text),
    "mixtral": lambda: (
        T.MixtralForCausalLM(T.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)),
        text,
    ),
    "bert": lambda: (T.BertForMaskedLM(T.BertConfig(**TEXT)), text),
    "deberta": lambda: (
        T.DebertaV2ForSequenceClassification(
            T.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        text,
    ),
    "mamba": lambda: (
        T.MambaForCausalLM(T.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3)),
        lambda samples, length: {"input_ids": ids(samples, length - 4)},  # it loops over positions
    ),
    "t5": lambda: (
        T.T5ForConditionalGeneration(
            T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        pair,
    ),
    "bart": lambda: (
        T.BartForConditionalGeneration(T.BartConfig(**PAIR, max_position_embeddings=32)),
        pair,
    ),
    "whisper": lambda: (
        T.WhisperForConditionalGeneration(
            T.WhisperConfig(**PAIR, max_source_positions=16, num_mel_bins=8)
        ),
        speech,
    ),
    "vit": lambda: (
        T.ViTForImageClassification(
            T.ViTConfig(**SMALL, num_hidden_layers=2, image_size=32, patch_size=8)
        ),
        image(32),
    ),
    "swin": lambda: (
        T.SwinForImageClassification(
            T.SwinConfig(
                image_size=32, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4
            )
        ),
        image(32),
    ),
    "convnext": lambda: (
        T.ConvNextForImageClassification(
            T.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1])
        ),
        image(32),
    ),
    "segformer": lambda: (
        T.SegformerForSemanticSegmentation(
            T.SegformerConfig(hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32)
        ),
        image(64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # of transformers, about what is not installed
def test_the_layers_are_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, batch = FAMILIES[name]()
    layers = cf.layers(model.train(), batch(3, 9))
    assert len(layers) >= 4
    for training in (True, False):
        model.train(training)
        assert cf.same_model(model, layers, batch(3, 9)).ok
        assert cf.same_model(model, layers, batch(2, 7)).ok


@pytest.mark.filterwarnings("ignore")
def test_a_decoder_with_a_config_of_its_own_keeps_no_cache() -> None:
    config = T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model: Any = T.T5ForConditionalGeneration(config)
    model.config.use_cache = False
    assert model.decoder.config.use_cache  # its own is as before
    assert len(cf.layers(model, pair(2, 5))) > 4


def test_an_encoder_and_a_decoder_train_in_stages() -> None:
    torch.manual_seed(0)
    config = T.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    model: nn.Module = T.T5ForConditionalGeneration(config)
    inputs, labels = pair(4, 9), ids(4, 7)

    def loss(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    def work() -> list[float]:
        pipeline = cf.Pipeline(
            model,
            loss,
            cf.schemes.zb_v(2, 4),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
            example=inputs,
        )
        return [pipeline.step(inputs, labels).loss for _ in range(3)]

    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        expected_loss = loss(alone(**inputs), labels)
        expected_loss.backward()
        optimizer.step()
        expected.append(expected_loss.item())
    assert cf.launch(work, workers=2, transport="local")[0] == pytest.approx(expected, rel=1e-5)


def numbered(samples: int, length: int) -> dict[str, Tensor]:
    """With two documents in each sample."""
    positions = torch.arange(length).repeat(samples, 1)
    for row in range(samples):
        positions[row, 3 + row :] -= 3 + row
    return {"input_ids": ids(samples, length), "position_ids": positions}


DECODERS: dict[str, Callable[[int, int], Any]] = {
    "llama": text,
    "mistral": numbered,  # with a window of less than the sequence
    "gpt2": numbered,
    "gpt-neox": ids,
    "opt": text,
    "gemma3": text,
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.filterwarnings("ignore")
def test_decoders_on_slices_are_the_model(name: str) -> None:
    model, inputs = tiny.made(name).double(), DECODERS[name](3, 9)
    layers = cf.layers(model, inputs)
    add_carries(layers)
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    outputs = in_slices(layers, inputs, [4, 3, 1, 1])
    logits = torch.cat([output.logits for output in outputs], 1)
    tolerance = 1e-5 if name == "gemma3" else 1e-10  # its norms compute in float32
    compare(model, model(**named, use_cache=False).logits, logits, tolerance=tolerance)


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_decoders_are_those_of_their_own_generate() -> None:
    prompt = ids(3, 6)
    for name, example in (("llama", {"input_ids": ids(2, 9)}), ("mistral", text(2, 9))):
        model = tiny.made(name).eval()
        options = {"max_new_tokens": 5, "do_sample": False, "use_cache": False, "eos_token_id": None}
        expected = model.generate(prompt, **options)
        model.train()

        def work(model: nn.Module = model, example: Any = example) -> Tensor:
            schedule = cf.schemes.dapple(2, 2)
            with cf.Pipeline(
                model, hf.loss, schedule, optimizer=torch.optim.SGD, example=example
            ) as pipeline:
                return pipeline.generate(prompt, tokens=5)

        for tokens in cf.launch(work, workers=2, transport="local"):
            assert tokens.tolist() == expected.tolist(), name
