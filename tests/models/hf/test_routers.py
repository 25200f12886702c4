"""The loss of routers: as transformers computes it for each micro-batch, over the layers of all stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf

import counterflow as cf
from counterflow.models import hf

from .tiny import SIZES, VOCABULARY

BATCH, POSITIONS = 8, 6

CONFIGS: dict[str, Any] = {
    "Mixtral": lambda **more: tf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, **more),
    "Qwen3Moe": lambda **more: tf.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        head_dim=8,
        **more,
    ),
}


def model_of(kind: str) -> Any:
    """A small model in float64; transformers computes its loss in float32, and its balance weighs 0.5."""
    torch.manual_seed(0)
    config = CONFIGS[kind](output_router_logits=True, router_aux_loss_coef=0.5, use_cache=False)
    model = getattr(tf, f"{kind}ForCausalLM")(config).double().train()
    model.set_experts_implementation("eager")  # others have no float64
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and a mask of unequal padding."""
    ids = torch.randint(3, VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[6, 2:] = 0
    return ids, mask


def steps(kind: str, schedule: str, **options: Any) -> list[tuple[float, float, float]]:
    """Losses, norms and added losses of two updates."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipeline = cf.Pipeline(model_of(kind), hf.loss, schedule, optimizer=sgd, list_layers=hf.layers, **options)
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask}
    done = [pipeline.step(inputs, ids) for _ in range(2)]
    return [(step.loss, step.grad_norm or 0.0, step.metrics["aux_loss"]) for step in done]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("Mixtral", "1f1b(workers=2, micro_batches=4)"), ("Qwen3Moe", "zb-v(workers=2, micro_batches=4)")],
)
def test_it_is_that_of_the_model_with_accumulated_micro_batches(kind: str, schedule: str) -> None:
    found = cf.launch(steps, kind, schedule, workers=2, transport="local", per_micro_batch_loss=True)[0]
    model, (ids, mask) = model_of(kind), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss, norm, added in found:
        optimizer.zero_grad()
        losses, balances = [], []
        for part, part_mask in zip(ids.chunk(4), mask.chunk(4), strict=True):
            output = model(input_ids=part, attention_mask=part_mask, labels=part)
            (output.loss / 4).backward()
            losses.append(output.loss.item())
            balances.append(0.5 * output.aux_loss.item())
        assert loss == pytest.approx(sum(losses) / 4, rel=1e-6)
        assert added == pytest.approx(sum(balances) / 4, rel=1e-6)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert norm == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-6)
        optimizer.step()


def test_it_is_refused_where_micro_batches_are_to_add_up() -> None:
    with pytest.raises(cf.ConfigError, match="per_micro_batch_loss=True"):
        cf.launch(steps, "Mixtral", "1f1b(workers=2, micro_batches=2)", workers=2, transport="local")


def test_it_is_refused_in_slices() -> None:
    schedule = "1f1b(workers=2, micro_batches=2, slices=2)"
    with pytest.raises(cf.ConfigError, match="product of means over all tokens, which slices and"):
        cf.launch(steps, "Mixtral", schedule, workers=2, transport="local")


def _captured(loss: Any, example: dict[str, Any], targets: Any) -> float:
    model = model_of("Mixtral").float()
    model.set_experts_implementation("grouped_mm")  # the eager one asks which experts are chosen
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipeline = cf.Pipeline(
        model, loss, cf.schemes.dapple(4, 4), optimizer=sgd, example=example, per_micro_batch_loss=True
    )
    return pipeline.step(example, targets).loss


def test_captured_layers_have_the_models_own_loss() -> None:
    ids = batch()[0]
    example = {"input_ids": ids, "labels": ids}
    loss = cf.launch(_captured, lambda output, _: output.loss, example, ids, workers=4, transport="local")[0]
    model = model_of("Mixtral").float()
    wanted = sum(model(input_ids=part, labels=part).loss.item() for part in ids.chunk(4)) / 4
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_captured_layers_with_a_loss_that_leaves_out_their_routers_are_refused() -> None:
    ids = batch()[0]
    with pytest.raises(cf.ConfigError, match=r"the loss of its routers \(aux_loss\), which this loss"):
        cf.launch(_captured, hf.loss, {"input_ids": ids}, ids, workers=4, transport="local")
