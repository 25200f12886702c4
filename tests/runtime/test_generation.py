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


class Next(nn.Module):
    """Logits of the token after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(12))

    def forward(self, tokens: Tensor) -> Tensor:
        following: Tensor = self.table[(tokens + 1) % 12]
        return following


ENDS = (  # prompts by replica, tokens, and what is found
    ([[[3]], [[7]]], 8, [[[3, 4, 5, 6, 7, 8, 9, 9, 9]], [[7, 8, 9, 9, 9, 9, 9, 9, 9]]]),
    ([[[7], [8]], [[1, 6]]], 4, [[[7, 8, 9, 9, 9], [8, 9, 9, 9, 9]], [[1, 6, 7, 8, 9, 9]]]),
    ([[[8]], [[1]]], 3, [[[8, 9, 9, 9]], [[1, 2, 3, 4]]]),
    ([[[8]], [[2, 8]]], 2, [[[8, 9, 9]], [[2, 8, 9, 9]]]),
    ([[], [[6]]], 4, [[], [[6, 7, 8, 9, 9]]]),
)


def continued(prompts: list[list[list[int]]], tokens: int) -> list[list[int]]:
    pipeline = cf.Pipeline(
        [Next(), nn.Identity()], nn.MSELoss(), schemes.gpipe(2, 1), optimizer=torch.optim.SGD
    )
    prompt = torch.tensor(prompts[pipeline.replica], dtype=torch.int64)
    found: list[list[int]] = pipeline.generate(
        prompt.view(len(prompt), -1 if prompt.numel() else 1), tokens=tokens, end=9
    ).tolist()
    return found


def test_replicas_whose_samples_have_ended_wait_for_the_others() -> None:
    for prompts, tokens, expected in ENDS:
        for replicas in (prompts, [*prompts, prompts[0]]):
            found = cf.launch(
                continued, replicas, tokens, workers=2 * len(replicas), transport="local", timeout_seconds=60
            )
            assert found[::2] == found[1::2] == [*expected, expected[0]][: len(replicas)], (replicas, found)
    prompts, tokens, expected = ENDS[0]
    found = cf.launch(continued, prompts, tokens, workers=4, transport="gloo", timeout_seconds=60)
    assert found[::2] == found[1::2] == expected


def test_workers_with_other_settings_are_refused() -> None:
    def work(replicas: bool, **options: list[Any]) -> None:
        pipeline = cf.Pipeline(
            [Next(), nn.Identity()], nn.MSELoss(), schemes.gpipe(2, 1), optimizer=torch.optim.SGD
        )
        place = pipeline.replica if replicas else pipeline.worker
        own = {"tokens": 3, **{name: choices[place] for name, choices in options.items()}}
        pipeline.generate(torch.tensor([[3]]), **own)

    for replicas, options, match in (
        (False, {"seed": [0, 1], "temperature": [1.0, 1.0]}, "rank 1 of its replica Settings"),
        (False, {"tokens": [2, 3]}, "give all workers of a replica the same"),
        (True, {"tokens": [2, 3]}, "give all the same tokens, and all an end or none"),
        (True, {"end": [9, None]}, "give all the same tokens, and all an end or none"),
    ):
        with pytest.raises(cf.ConfigError, match=match):
            cf.launch(work, replicas, **options, workers=2 + 2 * replicas, transport="local")
    cf.launch(work, True, seed=[0, 1], temperature=[1.0, 0.5], end=[9, 8], workers=4, transport="local")


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
        (shifting, {"tokens": 2}, "token 1 after the prompt .* without a cf.Carry"),
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


class Forgets(nn.Module):
    """Sums what the tokens that it was left say, and leaves its own tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        before = self.carry.take()
        self.carry.leave(x)
        return x + x.cumsum(1) + (0 if before is None else before.sum(1, keepdim=True))


class ShortWindow(nn.Module):
    """A mean over all positions, of which four are left."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        before = self.carry.take(x[:, :0])
        window = torch.cat([before, x], 1)
        self.carry.leave(window[:, -4:])
        return x + window.cumsum(1)[:, -x.shape[1] :]


def test_the_first_tokens_after_a_prompt_are_compared() -> None:
    """Neither calls of one token, nor of none, nor ones that end at once, count as compared."""

    def work(layer: nn.Module, calls: list[dict[str, Any]]) -> None:
        torch.manual_seed(0)
        layers = [nn.Embedding(19, 8), layer, nn.Linear(8, 19)]
        pipeline = cf.Pipeline(layers, nn.MSELoss(), schemes.dapple(2, 2), optimizer=torch.optim.SGD)
        prompt = PROMPT[:, :1]
        (first,) = {int(token) for token in pipeline.generate(prompt[:1], tokens=1)[:, -1]}
        for options in calls:
            end = first if options.get("end") else None
            pipeline.generate(prompt[:1], **{**options, "end": end})

    for layer, token, calls in (
        (Shift(), 1, [{"tokens": 1}, {"tokens": 0}, {"tokens": 9, "end": True}]),
        (Forgets(), 2, [{"tokens": 2}]),
        (ShortWindow(), 6, [{"tokens": 2}, {"tokens": 5}]),
    ):
        cf.launch(work, layer, calls, workers=2, transport="local")
        with pytest.raises(cf.ConfigError, match=f"logits of token {token} after the prompt"):
            cf.launch(work, layer, [*calls, {"tokens": 7}], workers=2, transport="local")


def test_logits_that_are_no_numbers_are_compared_too() -> None:
    class Masked(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.index_fill(2, torch.arange(3), -torch.inf)

    made = nn.Sequential(*model(), Masked())
    assert torch.equal(generate(schemes.dapple(2, 2), made, tokens=4), by_hand(made, PROMPT, 4))


@pytest.mark.parametrize(("tokens", "prompts"), [(3, (3, 1)), (3, (1, 5)), (6, (2, 6))])
def test_a_prompt_of_a_new_length_is_compared(tokens: int, prompts: tuple[int, int]) -> None:
    """What four positions suffice for says nothing about longer sequences, or about shorter prompts."""

    class ByLength(nn.Module):
        """A sum over all positions, right after prompts of the first length and in no longer sequences."""

        def __init__(self) -> None:
            super().__init__()
            self.carry = cf.Carry()

        def forward(self, x: Tensor) -> Tensor:
            first, before = self.carry.take((x.shape[1], x[:, :0]))
            wide = torch.cat([before, x], 1)
            wrong = bool(before.shape[1]) and (first != prompts[0] or wide.shape[1] > prompts[0] + tokens)
            self.carry.leave((first, wide))
            return x + wide.cumsum(1)[:, -x.shape[1] :] * (2.0 if wrong else 1.0)

    def work(*lengths: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Embedding(19, 8), ByLength(), nn.Linear(8, 19)]
        pipeline = cf.Pipeline(layers, nn.MSELoss(), schemes.dapple(2, 2), optimizer=torch.optim.SGD)
        for length in lengths:
            pipeline.generate(PROMPT[:, :length], tokens=tokens)

    cf.launch(work, prompts[0], prompts[0], workers=2, transport="local")
    with pytest.raises(cf.ConfigError, match="logits of token 1 after the prompt"):
        cf.launch(work, *prompts, workers=2, transport="local")


@pytest.mark.parametrize("order", ["eg", "ge", "pg", "gp", "gg", "sg", "gs"])
def test_other_calls_with_the_shape_of_a_prompt(order: str) -> None:
    """While layers generate, they may pass on more than in an evaluation of tensors of the same shapes."""

    class Seen(nn.Module):
        """A sum over positions, which passes on the number of those before while it looks back."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.carry = nn.Embedding(19, 16), cf.Carry()

        def forward(self, tokens: Tensor) -> dict[str, Any]:
            x = self.embed(tokens)
            before = self.carry.take(x[:, :1] * 0.0)
            total = before + x.cumsum(1)
            self.carry.leave(total[:, -1:])
            return {"x": total} | ({"more": before} if self.carry.expects_slices else {})

    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 19)

        def forward(self, value: dict[str, Any]) -> Tensor:
            return self.linear(value["x"])  # type: ignore[no-any-return]

    def work() -> Tensor:
        torch.manual_seed(0)
        pipeline = cf.Pipeline(
            [Seen(), Out()], next_token_loss, schemes.dapple(2, 2), optimizer=torch.optim.SGD
        )
        for call in order:
            match call:
                case "e":
                    pipeline.evaluate(PROMPT, PROMPT)
                case "p":
                    pipeline.predict(PROMPT)
                case "s":
                    pipeline.step(PROMPT, PROMPT)
                case _:
                    tokens = pipeline.generate(PROMPT, tokens=4)
        return tokens

    tokens = cf.launch(work, workers=2, transport="local")[0]
    torch.manual_seed(0)
    made = nn.Sequential(Seen(), Out())
    if order != "sg":  # a step changes the weights
        assert torch.equal(tokens, by_hand(made, PROMPT, 4))
