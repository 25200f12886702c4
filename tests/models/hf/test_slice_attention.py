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
from counterflow.schedule import schemes
from counterflow.schedule.registry import schedule_of
from counterflow.verification.training_agreement import TrainingAgreement, verify

from . import tiny

SEQ1F1B = "1f1b(stages=2, micro_batches=2, slices=3)"
TOLERANCES = {"gemma": 1e-6, "gemma3": 1e-6}
"""Of those whose norms compute in float32."""


def _batch(positions: int = 13) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, tiny.VOCABULARY, (4, positions))
    labels = ids.clone()
    labels[:, 8:][torch.rand(4, positions - 8) < 0.5] = -100
    return ids, labels


def _agreement(
    model: nn.Module, scheme: str = SEQ1F1B, *, batches: Any = None, **options: Any
) -> TrainingAgreement:
    torch.manual_seed(0)
    batches = batches or [[_batch()], [_batch()]]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    layers = hf.layers(model.double())
    return verify(schedule_of(scheme, {}), layers, hf.loss, batches, optimizer=optimizer, **options)


def _phi() -> nn.Module:
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "initializer_range"}
    config = tf.PhiConfig(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    model: nn.Module = tf.PhiForCausalLM(config).train()
    return model


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gpt2", "gpt-neox", "gemma", "gemma3", "granite"],
)
def test_decoders_train_as_one_process(name: str) -> None:
    """Mistral, Qwen 2 and Gemma 3 with a window of less than a slice."""
    for scheme in (SEQ1F1B, "zb-h1(stages=2, micro_batches=2, slices=2)"):
        differences = _agreement(tiny.made(name), scheme)
        errors = (
            differences.loss_error,
            differences.norm_error,
            differences.gradient_error,
            differences.weight_error,
        )
        assert max(errors) < TOLERANCES.get(name, 1e-10), (scheme, differences)


class _Double:
    """As torch, for modules that compute in float32 whatever their model's dtype."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_recurrent_layers_train_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's compute in float32; with float64 in its place the states' gradients are exact."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    ids, labels = _batch()
    single = "1f1b(stages=2, micro_batches=1, slices=9)"  # of one position some
    padding: dict[str, Any] = {"batches": [[(_padded(ids, before=True), labels)]]}
    for name, scheme, options in (
        ("mamba", SEQ1F1B, {"recompute": "layer"}),
        ("mamba2", SEQ1F1B, {"recompute": "stage"}),
        ("mamba", "zb-h1(stages=2, micro_batches=2, slices=2)", {}),
        ("mamba2", "chimera(stages=2, micro_batches=2, slices=2)", {}),
        ("mamba2", single, {}),
        ("falcon-mamba", single, {}),
        ("mamba", SEQ1F1B, padding),
        ("mamba2", single, padding),
    ):
        model = tiny.made(name)
        monkeypatch.setattr(sys.modules[type(model).__module__], "torch", _Double())
        differences = _agreement(model, scheme, **{"batches": [[(ids, labels)]], **options})
        assert differences.ok, (name, scheme, options)


def test_recurrent_layers_as_they_are() -> None:
    differences = _agreement(tiny.made("mamba2"))
    assert (
        max(
            differences.loss_error,
            differences.norm_error,
            differences.gradient_error,
            differences.weight_error,
        )
        < 5e-6
    ), differences


def test_phi_and_adapters_train_as_one_process() -> None:
    assert _agreement(_phi()).ok
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny.made("llama"), config)
    for scheme in (SEQ1F1B, "zb-h1(stages=2, micro_batches=2, slices=2)"):
        assert _agreement(adapted, scheme).ok, scheme


def test_options_train_as_one_process() -> None:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    for model, scheme, options in (
        (tiny.made("gpt2"), "zb-h1(stages=2, micro_batches=2, slices=2)", {"recompute": "layer"}),
        (tiny.made("llama-tied"), "chimera(stages=2, micro_batches=2, slices=2)", {"clip_norm": 0.1}),
        (peft.get_peft_model(tiny.made("gpt2"), config), SEQ1F1B, {"recompute": "stage", "zero_stage": 1}),
    ):
        assert _agreement(model, scheme, **options).ok, (scheme, options)


def _weights(scheme: str, recompute: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.2, fan_in_fan_out=True)
    model: Any = peft.get_peft_model(tiny.with_dropout().double(), config)
    for weight in model.parameters():
        weight.requires_grad_(True)
    pipeline = cf.Pipeline(
        model, hf.loss, scheme, list_layers=hf.layers, optimizer=partial(torch.optim.SGD, lr=0.1),
        recompute=recompute,
    )  # fmt: skip
    torch.manual_seed(1)
    ids, labels = _batch()
    pipeline.step(_packed(ids), labels)
    return {name: value.clone() for name, value in pipeline.state_dict()["model"].items()}


def test_dropout_is_drawn_by_slice_whatever_the_schedule_and_recomputation() -> None:
    """Of embeddings, layers, attention weights and adapters, also with packed documents."""
    results = []
    for scheme, stages, recompute in (("zb-h1", 2, "none"), ("1f1b", 4, "layer")):
        text = f"{scheme}(stages={stages}, micro_batches=2, slices=3)"
        rows = cf.launch(_weights, text, recompute, workers=stages, transport="local")
        results.append({name: value for row in rows for name, value in row.items()})
    for repeated in results[1:]:
        assert results[0].keys() == repeated.keys()
        for name, value in results[0].items():
            assert torch.allclose(value, repeated[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("bert", "layers of kind every_layer have masks that are neither causal nor causal within a window"),
        ("llama-eager", "calls transformers' attention 'sdpa' 0 times, and slices need one call; load the"),
        ("gemma2", "calls transformers' attention 'sdpa' 0 times"),
        ("olmo-hybrid", "a OlmoHybridLinearAttentionDecoderLayer does not scan as Mamba's layers do"),
        ("opt", r"layer 0 \(FirstLayer\) of stage 0 makes something else of a whole sequence"),
    ],
)
def test_other_attention_is_refused(name: str, match: str) -> None:
    with pytest.raises(cf.ConfigError, match=match):
        _agreement(tiny.made(name))


def _packed(ids: Tensor) -> dict[str, Tensor]:
    """With three documents a sample, of which one begins with the second of four slices."""
    positions = torch.arange(13).repeat(4, 1)
    for row, ends in enumerate(((4, 8), (3, 11), (5, 6), (1, 12))):
        for end in ends:
            positions[row, end:] = torch.arange(13 - end)
    return {"input_ids": ids, "position_ids": positions}


def _padded(ids: Tensor, *, before: bool = False) -> dict[str, Tensor]:
    """With as many positions of padding as the sample's number, after it or before."""
    mask = torch.ones_like(ids)
    for row in range(1, 4):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask if before else mask.flip(1)}


def _numbered(ids: Tensor) -> dict[str, Tensor]:
    return {**_padded(ids), "position_ids": _packed(ids)["position_ids"]}


def test_packed_documents_and_padding_train_as_one_process() -> None:
    """One process has transformers' own masks."""
    four = "1f1b(stages=2, micro_batches=2, slices=4)"
    for name, inputs_of, scheme, options in (
        ("llama", _packed, four, {}),
        ("mistral", _packed, SEQ1F1B, {"recompute": "layer"}),
        ("gpt2", _packed, "zb-h1(stages=2, micro_batches=2, slices=2)", {}),
        ("llama", _padded, four, {"recompute": "stage"}),
        ("mistral", partial(_padded, before=True), SEQ1F1B, {}),
        ("qwen2", partial(_padded, before=True), four, {}),
        ("gpt-neox", _numbered, SEQ1F1B, {}),
    ):
        ids, labels = _batch()
        differences = _agreement(tiny.made(name), scheme, batches=[[(inputs_of(ids), labels)]], **options)
        assert differences.ok, (name, inputs_of, scheme, differences)


def _with_mask_of_pairs() -> None:
    pipeline = cf.Pipeline(
        tiny.made("llama"),
        hf.loss,
        SEQ1F1B,
        list_layers=hf.layers,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    ids, labels = _batch()
    pipeline.step({"input_ids": ids, "attention_mask": torch.ones(4, 13, 13, dtype=torch.bool)}, labels)


def test_a_mask_of_pairs_is_refused() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"attention_mask of shape \(2, 4, 13\) is among the inputs, and in"
    ):
        cf.launch(_with_mask_of_pairs, workers=2, transport="local")


def _peak(slices: int) -> int:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    pipeline = cf.Pipeline(
        tf.LlamaForCausalLM(config).train(),
        hf.loss,
        schemes.dapple(stages=4, micro_batches=4, slices=slices),
        list_layers=hf.layers,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        cuts=[2, 3, 4],
    )
    ids = torch.randint(32, (4, 256))
    pipeline.step(ids, ids)
    return pipeline.peak_saved_bytes


def test_what_earlier_slices_left_is_saved_once() -> None:
    unsliced, four = (max(cf.launch(_peak, n, workers=4, transport="local")) for n in (1, 4))
    assert four < 0.45 * unsliced


def _evaluations() -> list[float]:
    torch.manual_seed(0)
    model = tiny.made("mistral").double()
    pipeline = cf.Pipeline(
        model, hf.loss, SEQ1F1B, list_layers=hf.layers, optimizer=partial(torch.optim.SGD, lr=0.0),
        dynamic_shapes=True,
    )  # fmt: skip
    ids, labels = _batch()
    losses = [pipeline.evaluate(ids, labels).loss]
    losses.append(pipeline.step(ids, labels).loss)
    positions = torch.arange(13).expand(4, -1)
    extras: tuple[dict[str, Tensor], ...] = (
        {},
        {"attention_mask": torch.ones_like(ids)},
        {"position_ids": positions},
    )
    mini_batches = [{"input_ids": ids, **its} for its in extras]
    return [
        *losses,
        *(pipeline.step(its, labels).loss for its in mini_batches),
        *(pipeline.evaluate(its, labels).loss for its in mini_batches),
    ]


def test_evaluations_before_and_after_are_the_same() -> None:
    losses = cf.launch(_evaluations, workers=2, transport="local")[0]
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-10)


def test_tokens_are_those_of_transformers_own_generate() -> None:
    """Each token runs alone, from what layers left; transformers computes without its cache."""
    prompt = torch.randint(3, tiny.VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(1))
    for name in ("llama", "mistral", "gpt2", "gpt-neox", "gemma3", "mamba"):
        torch.manual_seed(0)
        model = tiny.made(name).eval()
        expected = model.generate(
            prompt, max_new_tokens=7, do_sample=False, use_cache=False, eos_token_id=None
        )
        model.train()

        def work(model: nn.Module = model) -> Tensor:
            with cf.Pipeline(
                model, hf.loss, schemes.dapple(2, 2), list_layers=hf.layers, optimizer=torch.optim.SGD
            ) as pipeline:
                return pipeline.generate(prompt, tokens=7)

        for tokens in cf.launch(work, workers=2, transport="local"):
            assert tokens.tolist() == expected.tolist(), name
