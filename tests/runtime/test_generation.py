"""Tokens that a model in stages adds: those of one process that runs the whole sequence for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.models.gpt import GPTConfig
from counterflow.models.loss import next_token_loss
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

CONFIG = GPTConfig(vocabulary=19, positions=24, hidden=16, heads=4, layers=3, dropout=0.1)
PROMPT = torch.randint(19, (5, 7), generator=torch.Generator().manual_seed(3))


def model(config: GPTConfig = CONFIG) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*config.build())
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.4)  # fresh ones give about the same logits everywhere
    return made.double()


def by_hand(made: nn.Module, prompt: Tensor, tokens: int) -> Tensor:
    """The most likely tokens, of whole sequences."""
    made.eval()
    with torch.no_grad():
        for _ in range(tokens):
            prompt = torch.cat([prompt, made(prompt)[:, -1].argmax(-1, keepdim=True)], 1)
    return prompt


def generate(
    schedule: Schedule, made: nn.Module | None = None, prompt: Tensor | None = PROMPT, **options: Any
) -> Tensor:
    """What every worker has; only those with the first stage are given the prompt."""

    def work() -> Tensor:
        with cf.Pipeline(
            model() if made is None else made, next_token_loss, schedule, optimizer=torch.optim.SGD
        ) as pipeline:
            mine = prompt if 0 in pipeline.stages else None
            found = [pipeline.generate(mine, **options) for _ in range(2)]
            assert torch.equal(*found)
            return found[0]

    every = cf.launch(work, workers=schedule.workers, transport="local")
    assert all(torch.equal(found, every[0]) for found in every)
    return every[0]


def test_the_most_likely_tokens_are_those_of_whole_sequences() -> None:
    expected = by_hand(model(), PROMPT, 9)
    for schedule in (
        schemes.dapple(2, 2),
        schemes.chimera(4, 4),
        schemes.zb_v(2, 4),
        schemes.dapple(3, 8),  # more micro-batches than samples
        schemes.pipedream(2),
        schemes.dapple(stages=2, micro_batches=2, slices=2),
    ):
        assert torch.equal(generate(schedule, tokens=9), expected), str(schedule)
    assert torch.equal(generate(schemes.dapple(2, 2), tokens=0), PROMPT)


def test_draws_do_not_depend_on_the_schedule() -> None:
    options: dict[str, Any] = {"tokens": 8, "temperature": 0.7, "top_k": 5, "seed": 3}
    one = generate(schemes.dapple(2, 2), **options)
    assert torch.equal(generate(schemes.hanayo(2, 4, waves=1), **options), one)
    assert not torch.equal(generate(schemes.dapple(2, 2), **{**options, "seed": 4}), one)


def test_a_sample_ends_with_a_token() -> None:
    plain = by_hand(model(), PROMPT, 9)
    end = int(plain[0, 9])
    found = generate(schemes.dapple(2, 2), tokens=9, end=end)
    for row, expected in zip(found[:, 7:].tolist(), plain[:, 7:].tolist(), strict=True):
        kept = expected[: expected.index(end)] if end in expected else expected
        assert row == kept + [end] * (9 - len(kept))


def test_training_goes_on_as_if_nothing_was_generated() -> None:
    targets = PROMPT.roll(-1, 1)

    def work(*, generates: bool) -> list[float]:
        with cf.Pipeline(
            model(), next_token_loss, schemes.dapple(2, 2), optimizer=torch.optim.SGD
        ) as pipeline:
            found = []
            for _ in range(2):
                found.append(pipeline.step(PROMPT, targets).loss)
                if generates:
                    pipeline.generate(PROMPT, tokens=3, temperature=1.0)
            return found

    first, other = (
        cf.launch(work, workers=2, transport="local", generates=generates) for generates in (True, False)
    )
    assert first == other


class Shift(nn.Module):
    """Looks at the position before, without a Carry."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def test_what_is_refused() -> None:
    torch.manual_seed(0)
    shifting = nn.Sequential(nn.Embedding(19, 8), Shift(), nn.Linear(8, 19))
    for made, options, match in (
        (shifting, {"tokens": 2}, "without a cf.Carry"),
        (nn.Sequential(nn.Embedding(19, 8), nn.Flatten()), {"tokens": 2}, "generate needs logits"),
        (None, {"tokens": -1}, "tokens = -1"),
        (None, {"tokens": 1, "temperature": -1.0}, "temperature = -1.0"),
        (None, {"tokens": 1, "top_k": 0}, "top_k = 0"),
        (None, {"tokens": 1, "prompt": None}, "and was given nothing"),
        (None, {"tokens": 1, "prompt": PROMPT.float()}, "torch.float32 of shape"),
        (None, {"tokens": 30}, "at most 24 are legal"),
    ):
        with pytest.raises(cf.CounterflowError, match=match):
            generate(schemes.dapple(2, 2), made, **options)
