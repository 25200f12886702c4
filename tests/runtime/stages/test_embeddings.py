"""Embeddings with sparse gradients, and with a largest norm: as in one process, or refused at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.training_agreement import verify

from ...kit import momentum, run

F = torch.float64
WIDTH, TOKENS = 4, 9
FLUSHING = [
    schemes.dapple(2, 4),
    schemes.chimera(2, 8, concat="backward-halving"),
    schemes.zb_v(2, 4),
]
CONTINUOUS = [schemes.pipedream(2), schemes.pipedream_2bw(2, 2)]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, TOKENS - 2, (16,), generator=generator)
    return x, torch.randn(16, WIDTH, generator=generator, dtype=F)


def layers(**options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    embedding = nn.Embedding(TOKENS, WIDTH, dtype=F, **options)
    return [embedding, *(nn.Linear(WIDTH, WIDTH, dtype=F) for _ in range(3))]


class Tied(nn.Module):
    """Ends with the embedding's weight."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x @ self.weight[:WIDTH].t()  # type: ignore[index]
        return found


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", [*FLUSHING, *CONTINUOUS], ids=str)
def test_sparse_gradients_are_right(schedule: Schedule, recompute: str) -> None:
    found = verify(
        schedule,
        layers(sparse=True),
        nn.functional.mse_loss,
        [[batch(n)] for n in range(6)],
        optimizer=momentum,
        clip_norm=0.1,
        transport="strict-local",
        recompute=recompute,
    )
    assert found.ok, found


@pytest.mark.parametrize(
    ("options", "schedule", "more", "message"),
    [
        ({"max_norm": 1.0}, CONTINUOUS[0], {}, "max_norm=1, which .* pipedream keeps several versions"),
        ({"max_norm": 1.0}, FLUSHING[1], {}, "each of the 2 copies of stage 0 would change its own"),
        ({"max_norm": 1.0}, FLUSHING[0], {"tied": True}, r"0\.weight is a weight of other stages too"),
        ({"max_norm": 1.0}, FLUSHING[0], {"compute_dtype": torch.bfloat16}, "compute_dtype puts a copy"),
        ({"sparse": True}, FLUSHING[0], {"compute_dtype": torch.bfloat16}, "sparse=True, whose gradients"),
        ({"sparse": True}, FLUSHING[0], {"optimizer": torch.optim.SparseAdam}, "stage . is a SparseAdam"),
    ],
)
def test_what_would_not_be_right_is_refused_at_once(
    options: dict[str, Any], schedule: Schedule, more: dict[str, Any], message: str
) -> None:
    def work() -> None:
        model = layers(**options)
        given = {"optimizer": momentum, **more}
        if given.pop("tied", False):
            model.append(Tied(model[0]))
        Pipeline(model, nn.functional.mse_loss, schedule, **given)

    with pytest.raises(ConfigError, match=message):
        run(work)


class Counting(nn.Module):
    """Calls torch's function on a weight of its own."""

    def __init__(self, *, bag: bool) -> None:
        super().__init__()
        self.weight, self.bag = nn.Parameter(torch.randn(TOKENS, WIDTH, dtype=F)), bag

    def forward(self, x: Tensor) -> Tensor:
        if self.bag:
            x = x[:, None]
            return nn.functional.embedding_bag(x, self.weight, mode="sum", scale_grad_by_freq=True)
        return nn.functional.embedding(x, self.weight, scale_grad_by_freq=True)


@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}, {"example": batch(0)[0]}], ids=str)
@pytest.mark.parametrize("bag", [False, True])
def test_functions_that_count_indices_are_refused_in_the_first_step(
    bag: bool, options: dict[str, Any]
) -> None:
    def work() -> None:
        model = nn.Sequential(Counting(bag=bag), *layers()[1:])
        pipeline = Pipeline(model, nn.functional.mse_loss, FLUSHING[0], optimizer=momentum, **options)
        pipeline.step(*batch(0))

    with pytest.raises(ConfigError, match=r"^stage 0 calls an embedding with scale_grad_by_freq=True"):
        run(work)


def test_replicas_are_copies_too() -> None:
    def work() -> None:
        Pipeline(layers(max_norm=1.0), nn.functional.mse_loss, FLUSHING[0], optimizer=momentum)

    with pytest.raises(ConfigError, match="each of the 2 copies of stage 0 would change its own"):
        run(work, workers=4)


class Shrinks(nn.Linear):
    """Changes its weight as ``max_norm`` does, by a function that no option tells of."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x.detach()) + 0 * x


@pytest.mark.parametrize(
    ("schedule", "more", "message"),
    [
        (CONTINUOUS[0], {}, "changes its weight 'weight' in training, and an asynchronous schedule keeps"),
        (CONTINUOUS[1], {}, "changes its weight 'weight' in training, and an asynchronous schedule keeps"),
        (
            FLUSHING[0],
            {"tied": True},
            "changes its weight 'weight' .* which is one of other stages",
        ),
        (FLUSHING[0], {"compute_dtype": torch.bfloat16}, "with compute_dtype what it changes is a copy"),
    ],
)
def test_a_forward_that_changes_weights_is_refused(
    schedule: Schedule, more: dict[str, Any], message: str
) -> None:
    def work() -> None:
        torch.manual_seed(0)
        model: list[nn.Module] = [Shrinks(WIDTH, WIDTH, dtype=F), nn.Linear(WIDTH, WIDTH, dtype=F)]
        options = {"optimizer": momentum, **more}
        if options.pop("tied", False):
            model.append(Tied(model[0]))
        pipeline = Pipeline(model, nn.functional.mse_loss, schedule, **options)
        for number in range(3):
            y = batch(number)[1]
            pipeline.step(y, y)

    with pytest.raises(ConfigError, match=message):
        run(work)
