"""What torch.distributed.pipelining's own tests train, and its users ask for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from counterflow.schedule.ir import Schedule

from . import alone
from .alone import SCHEMES, Case, Given, agrees, numbers, piped, seeded
from .models import (
    WIDTH,
    Alias,
    ByHand,
    First,
    FromDict,
    Mlp,
    OneOfMany,
    ThroughDict,
    ToDict,
    Twice,
    WithKwargs,
)


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


def with_kwargs(step: int) -> Given:
    given = plain(step)
    return Given(given.inputs, given.targets, {"scale": numbers(step + 200, 16, 1), "shift": None})


def scaled_for_all(step: int) -> Given:
    given = plain(step)
    return Given(given.inputs, given.targets, {"scale": numbers(step + 200, WIDTH)})


def samples_second(step: int) -> Given:
    return Given(numbers(step, WIDTH, 16), numbers(step + 100, WIDTH, 16))


class Turned(nn.Module):
    """Takes and gives samples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp(x.t()).t()
        return found


def frozen() -> list[nn.Module]:
    layers: list[nn.Module] = [Mlp() for _ in range(5)]
    for layer in (layers[0], layers[3]):
        layer.requires_grad_(requires_grad=False)
    return layers


def loss_of_pair(output: Any, target: Tensor) -> Any:
    loss = nn.functional.mse_loss(output[0], target)
    return loss, {"largest": output[0].max(), "constant": 3.0}


CASES = {
    "layers": Case(seeded(lambda: [Mlp() for _ in range(4)]), plain),
    "keyword arguments": Case(seeded(lambda: [WithKwargs(), *(Mlp() for _ in range(3))]), with_kwargs),
    "an argument for all samples": Case(
        seeded(lambda: [WithKwargs(), *(Mlp() for _ in range(3))]),
        scaled_for_all,
        options={"kwarg_dims": {"scale": None}},
    ),
    "samples in the second dimension": Case(
        seeded(lambda: [Turned() for _ in range(4)]),
        samples_second,
        options={"input_dims": 1, "target_dims": 1},
    ),
    "a parameter with two names": Case(seeded(lambda: [Alias(), Mlp(), Alias(), Alias()]), plain),
    "a norm used twice": Case(seeded(lambda: [Twice() for _ in range(4)]), plain),
    "a dict with all kinds of values": Case(
        seeded(lambda: [ToDict(), *(ThroughDict(WIDTH, WIDTH) for _ in range(3)), FromDict(WIDTH, WIDTH)]),
        plain,
    ),
    "custom functions": Case(seeded(lambda: [ByHand(WIDTH, WIDTH) for _ in range(4)]), plain),
    "frozen stages": Case(seeded(frozen), plain),
    "nothing to train before the end": Case(
        seeded(
            lambda: [*(Mlp().requires_grad_(requires_grad=False) for _ in range(3)), Mlp()],
        ),
        plain,
    ),
    "layers without weights": Case(
        seeded(lambda: [nn.Tanh(), Mlp(), nn.ReLU(inplace=True), Mlp(), nn.Identity(), Mlp()]), plain
    ),
    "outputs without a gradient, and unused": Case(
        seeded(lambda: [*(OneOfMany() for _ in range(4)), First()]), plain
    ),
    "a loss of a tuple, with metrics": Case(
        seeded(lambda: [OneOfMany() for _ in range(4)]), plain, loss_of_pair
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("workers", SCHEMES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case, workers: int) -> None:
    agrees(case, workers, turn=list(CASES.values()).index(case))


def _dicts(pairs: list[tuple[Schedule, str]]) -> Any:
    return piped(CASES["a dict with all kinds of values"], pairs)


def test_a_case_is_as_in_one_process_between_processes() -> None:
    agrees(CASES["a dict with all kinds of values"], 2, by_name=_dicts)


def test_every_recomputation_in_every_scheme() -> None:
    agrees(CASES["a dict with all kinds of values"], 2, every=True)


def test_a_case_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, norms, state = alone.alone(CASES["layers"])
    monkeypatch.setattr(alone, "alone", lambda _: (losses, [norm * (1 + 1e-9) for norm in norms], state))
    with pytest.raises(AssertionError, match="not close"):
        agrees(CASES["layers"], 2)
