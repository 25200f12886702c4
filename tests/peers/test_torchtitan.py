"""What torchtitan's users train: decoder blocks with tables and masks, losses by tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow import LossSum

from .alone import SCHEMES, Case, Given, agrees, seeded
from .models import Attention, Embedded, Head

TOKENS, IGNORED = 11, -100


def decoder() -> list[nn.Module]:
    return [Embedded(TOKENS), Attention(), Attention(), Attention(), Head(TOKENS)]


def texts(step: int) -> Given:
    """Texts of one length a step; in some micro-batches nothing counts."""
    drawn = torch.Generator().manual_seed(step)
    length = 4 + step
    found = torch.randint(1, TOKENS, (16, length), generator=drawn)
    counted = found.roll(-1, 1)
    counted[:, -1] = IGNORED
    counted[3:8] = IGNORED
    return Given(found, counted)


def masked(step: int) -> Given:
    """The same with the mask as a keyword argument."""
    one = texts(step)
    mask = torch.ones_like(one.inputs, dtype=torch.bool)
    mask[::2, -1:] = False
    return Given(one.inputs, one.targets, {"mask": mask})


def by_tokens(output: Tensor, target: Tensor) -> LossSum:
    loss = nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    count = (target != IGNORED).sum()
    return LossSum(loss, count, {"hits": ((output.argmax(-1) == target) & (target != IGNORED)).sum()})


CASES: dict[str, Case] = {
    "a loss by tokens": Case(seeded(decoder), texts, by_tokens),
    "a mask as an argument": Case(seeded(decoder), masked, by_tokens),
    "normed blocks in half the layers frozen": Case(
        seeded(lambda: [one.requires_grad_(requires_grad=i != 1) for i, one in enumerate(decoder())]),
        texts,
        by_tokens,
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("workers", SCHEMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Any, workers: int) -> None:
    agrees(case, workers, turn=list(CASES.values()).index(case))
