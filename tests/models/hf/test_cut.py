"""Models of transformers cut into layers: the numbers of the model itself, in every scheme."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import counterflow as cf
from counterflow.models import hf
from counterflow.models.hf import attention_masks
from counterflow.schedule.ir import Schedule

from . import tiny

Batch = tuple[dict[str, Tensor], Tensor]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def run_through(model: nn.Module, value: Any) -> Any:
    for layer in hf.layers(model):
        value = layer(value)
    return value


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_layers_give_what_the_model_gives(name: str) -> None:
    model = tiny.made(name)
    for padded in (False, True):
        inputs, labels = tiny.batch(name, padded=padded)
        expected, output = model(**inputs, labels=labels), run_through(model, inputs)
        assert type(output) is type(expected)
        where = inputs["attention_mask"].bool() if padded and output.logits.dim() == 3 else ...
        torch.testing.assert_close(output.logits[where], expected.logits[where], rtol=0, atol=1e-6)
        loss = hf.loss(output, labels)
        torch.testing.assert_close(loss.sum / loss.weight, expected.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mistral", "gemma2"])
def test_packed_sequences(name: str) -> None:
    """Positions that begin anew begin a sequence that sees no other."""
    model = tiny.made(name)
    (inputs, _) = tiny.batch(name, 2, padded=False)
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    logits = run_through(model, {**inputs, "position_ids": positions}).logits
    separate = [model(input_ids=part).logits for part in inputs["input_ids"].split([7, 5], dim=1)]
    torch.testing.assert_close(logits, torch.cat(separate, 1), rtol=0, atol=1e-5)


SCHEMES = [
    cf.schemes.dapple(3, 4),
    cf.schemes.chimera(4, 4),
    cf.schemes.chimera(2, 4, concat="forward-doubling"),
    cf.schemes.chimera(2, 4, concat="backward-halving"),
    cf.schemes.interleaved(2, 4, chunks=2),
    cf.schemes.hanayo(2, 4, waves=1),
    cf.schemes.zb_v(2, 4),
]


def trained(model: nn.Module, schedule: Schedule, batches: list[Batch], **options: Any) -> Any:
    """Losses and norms of each step, and the weights at the end."""
    pipeline = cf.Pipeline(
        model, hf.loss, schedule, optimizer=adamw, list_layers=hf.layers, clip_norm=0.5, **options
    )
    steps = [pipeline.step(*mini_batch) for mini_batch in batches]
    return [(step.loss, step.grad_norm) for step in steps], pipeline.model_state_dict()


def agrees(model: Any, schedule: Schedule, batches: list[Batch], **options: Any) -> None:
    alone = copy.deepcopy(model)
    results = cf.launch(
        trained,
        model,
        schedule,
        batches,
        workers=schedule.workers,
        transport="local",
        timeout_seconds=60,
        **options,
    )
    steps, state = results[0]
    for name, tensor in model.state_dict().items():  # the threads trained the model they were given
        assert torch.equal(state[name], tensor), name
    optimizer = adamw([p for p in alone.parameters() if p.requires_grad])
    for (loss, norm), (inputs, labels) in zip(steps, batches, strict=True):
        optimizer.zero_grad()
        expected = alone(**inputs, labels=labels).loss
        expected.backward()
        of_all = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(of_all.item(), rel=1e-4)
    alone_state = alone.state_dict()
    assert list(state) == list(alone_state)
    for name, tensor in alone_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.table
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_every_scheme_trains_as_one_process(name: str, schedule: Schedule) -> None:
    batches = [tiny.batch(name, seed=seed) for seed in range(3)]
    agrees(tiny.made(name), schedule, batches)


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "gemma2", "bert"])
def test_every_recomputation_trains_as_one_process(name: str, recompute: str) -> None:
    batches = [tiny.batch(name, seed=seed) for seed in range(2)]
    agrees(tiny.made(name), cf.schemes.chimera(2, 4), batches, recompute=recompute)


@pytest.mark.parametrize("name", [*tiny.CAUSAL, "bert-classes", "llama-classes", "bert-tokens"])
def test_every_model_trains_as_one_process(name: str) -> None:
    batches = [tiny.batch(name, seed=seed) for seed in range(3)]
    agrees(tiny.made(name), cf.schemes.hanayo(2, 4, waves=1), batches)


def test_what_no_plan_names_has_to_come_before_the_repeated_layers() -> None:
    """Else it would be in the first layer, and the last one would go on without it."""

    class After(transformers.LlamaModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.more = nn.Linear(32, 32)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.last_hidden_state = self.more(found.last_hidden_state)
            return found

    model: Any = tiny.made("llama")
    model.model = After(model.config).train()
    with pytest.raises(
        cf.ConfigError, match=r"does not call model\.more before its repeated layers, which a"
    ):
        run_through(model, tiny.batch("llama")[0])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bert", "modernbert"])
def test_masks_go_with_a_value_a_position(name: str) -> None:
    first = hf.layers(tiny.made(name))[0]
    inputs, _ = tiny.batch(name, padded=True)
    length = inputs["input_ids"].shape[1]
    arguments = first(inputs)["taken"]
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    assert not any(mask.shape[-2:] == (length, length) for mask in tensors)
    for kind, expanded in attention_masks.widened(arguments).items():
        wide = [leaf for leaf in pytree.tree_leaves(expanded) if isinstance(leaf, Tensor) and leaf.dim() == 4]
        assert [mask.shape for mask in wide] == [(8, 1, length, length)], kind


def test_a_mask_of_another_form_goes_as_it_is() -> None:
    odd = torch.rand(8, 1, 5, 5) < 0.5
    positions = torch.arange(5).expand(8, -1)
    for form, separate in attention_masks.forms_of([2, None], packed=True):
        assert attention_masks.narrowed(odd, form, positions if separate else None) is None


def test_a_model_without_a_mask_hands_none_on() -> None:
    first = hf.layers(tiny.made("llama"))[0]
    (inputs, _) = tiny.batch("llama", padded=False)
    ((_, arguments),) = first(inputs["input_ids"])["taken"].values()
    assert arguments["attention_mask"] is None
    ((_, arguments),) = first({**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])})[
        "taken"
    ].values()
    assert arguments["attention_mask"].keys.shape == (8, tiny.POSITIONS)


def predicted(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    pipeline = cf.Pipeline(model, hf.loss, cf.schemes.dapple(2, 4), optimizer=adamw, list_layers=hf.layers)
    logits: Tensor = pipeline.predict(kwargs=inputs).logits
    return logits


def test_predictions_are_the_models_own() -> None:
    model = tiny.with_dropout()
    (inputs, _) = tiny.batch("gpt2")
    results = cf.launch(predicted, model, inputs, workers=2, transport="local", timeout_seconds=60)
    expected = model.eval()(**inputs).logits
    where = inputs["attention_mask"].bool()
    torch.testing.assert_close(results[0][where], expected[where], rtol=0, atol=1e-5)


# -- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.eval(), "call model.train"),
        (
            lambda model: setattr(model.config, "_attn_implementation", "flex_attention"),
            'attn_implementation="sdpa"',
        ),
        (lambda model: setattr(model, "loss_function", hf.loss), "has its own loss_function"),
    ],
)
def test_what_a_pipeline_would_do_otherwise_is_refused(change: Any, message: str) -> None:
    model = tiny.made("llama")
    change(model)
    with pytest.raises(cf.ConfigError, match=message):
        hf.layers(model)


def test_unknown_models_are_refused() -> None:
    import transformers as tf

    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = tf.T5ForConditionalGeneration(tf.T5Config(**sizes)).train()
    with pytest.raises(cf.ConfigError, match=r"a T5ForConditionalGeneration cannot be cut.*of your own"):
        hf.layers(model)
    with pytest.raises(cf.ConfigError, match="a Linear is not a model of transformers"):
        hf.layers(nn.Linear(2, 2))


def test_labels_among_the_inputs_are_refused() -> None:
    inputs, labels = tiny.batch("llama")
    with pytest.raises(cf.ConfigError, match="as targets"):
        hf.layers(tiny.made("llama"))[0]({**inputs, "labels": labels})
    with pytest.raises(cf.ConfigError, match="num_items_in_batch is among the inputs; leave it out"):
        hf.layers(tiny.made("llama"))[0]({**inputs, "num_items_in_batch": labels.sum()})


class _Scaled(nn.Module):
    """A layer that looks as the others and is not called as they are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return (self.layer(hidden, **kwargs),)


def test_layers_that_cannot_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    model = tiny.made("llama")
    model.model.layers[1] = _Scaled(model.model.layers[1])
    with pytest.raises(cf.ConfigError, match="more than one tensor"):
        run_through(model, tiny.batch("llama")[0])

    def forward(self: Any, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = 2 * layer(hidden)
        return hidden

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(
        cf.ConfigError, match="changes the value that flows from one repeated layer to the next"
    ):
        run_through(tiny.made("llama"), tiny.batch("llama")[0])


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(cf.ConfigError, match="has no logits"):
        hf.loss(torch.zeros(2), torch.zeros(2))
