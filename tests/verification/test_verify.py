"""What both sides of a comparison are given, and that a difference of either is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterflow.execution import Batching, Execution
from counterflow.schedule import schemes
from counterflow.schedule.modes import Recompute
from counterflow.verification import training_agreement
from counterflow.verification.reference import Staleness
from counterflow.verification.training_agreement import TrainingAgreement, TrainingResult, compare, verify

from ..kit import sgd

D = torch.float64


class Calls:
    """Stands for both trainings and notes what they are given; each ends with the same numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = TrainingResult([], 1.0, {"w": torch.ones(1)}, {"w": torch.ones(1)})
        self.reference: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.pipeline: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.threads = 0

        def one_process(*args: Any, **options: Any) -> TrainingResult:
            self.reference = args, options
            self.threads = torch.get_num_threads()
            return found

        def launch(*args: Any, **options: Any) -> list[TrainingResult]:
            self.pipeline = args, options
            return [found]

        monkeypatch.setattr(training_agreement, "one_process", one_process)
        monkeypatch.setattr(training_agreement, "launch", launch)


def slower(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def linears(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=D) for _ in range(count)]


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(seed), dtype=D)
    return x, y


@pytest.fixture
def threads() -> Any:
    """Three threads for torch, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_by_default(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    calls = Calls(monkeypatch)
    layers, schedule = linears(), schemes.chimera(2, 4, concat="backward-halving")
    batches = [[batch(0), batch(1)]]
    found = verify(schedule, layers, mean, batches, optimizer=sgd)
    assert found == TrainingAgreement(0.0, 0.0, 0.0, 0.0, 1e-5)
    assert calls.reference is not None
    assert calls.reference[0] == (layers, mean, (2, 2, 2, 2), batches)
    assert calls.reference[1] == {
        "optimizer": sgd,
        "scheduler": None,
        "seed": 0,
        "clip_norm": None,
        "device": "cpu",
        "staleness": None,
        "flush_after": (),
        "autocast": None,
        "compute_dtype": None,
        "scaler": None,
        "progress": None,
    }
    assert calls.threads == torch.get_num_threads() == threads
    assert calls.pipeline is not None
    (_, its_schedule, its_layers, its_loss, its_batches, its_options), options = calls.pipeline
    assert (its_schedule, its_loss, its_batches) == (schedule, mean, batches)
    assert its_options == {
        "optimizer": sgd,
        "scheduler": None,
        "execution": Execution(digest_every=1, timeout_seconds=120.0),
        "batching": Batching(),
        "flush_after": (),
        "progress": None,
    }
    assert options == {
        "workers": 4,
        "transport": "local",
        "device": "cpu",
        "timeout_seconds": 120.0,
        "threads": None,
    }
    for mine, theirs in zip(layers, its_layers, strict=True):  # which threads will train
        assert mine is not theirs
        assert torch.equal(mine.get_parameter("weight"), theirs.get_parameter("weight"))


def test_every_option_goes_to_both(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    calls = Calls(monkeypatch)
    schedule = schemes.pipedream(2)
    found = verify(
        schedule,
        linears(3),
        mean,
        [[batch()]],
        optimizer=sgd,
        scheduler=slower,
        transport="strict-nccl",
        timeout_seconds=7.0,
        seed=5,
        clip_norm=2.0,
        device="meta",
        flush_after=[1, 3],
        autocast=torch.bfloat16,
        cuts=(2,),
        recompute="stage",
        target_dims=1,
    )
    assert found.ok
    assert calls.reference is not None
    staleness = calls.reference[1].pop("staleness")
    assert staleness == Staleness.of(schedule, (2,))
    assert calls.reference[1] == {
        "optimizer": sgd,
        "scheduler": slower,
        "seed": 5,
        "clip_norm": 2.0,
        "device": "meta",
        "flush_after": [1, 3],
        "autocast": torch.bfloat16,
        "compute_dtype": None,
        "scaler": None,
        "progress": None,
    }
    assert (calls.threads, torch.get_num_threads()) == (1, threads)
    assert calls.pipeline is not None
    assert calls.pipeline[0][-1] == {
        "optimizer": sgd,
        "scheduler": slower,
        "execution": Execution(
            digest_every=1,
            timeout_seconds=7.0,
            seed=5,
            clip_norm=2.0,
            autocast="bfloat16",
            recompute=Recompute.STAGE,
        ),
        "batching": Batching(target_dims=1),
        "flush_after": (1, 3),
        "progress": None,
        "cuts": (2,),
    }
    assert calls.pipeline[1] == {
        "workers": 2,
        "transport": "strict-nccl",
        "device": "meta",
        "timeout_seconds": 7.0,
        "threads": 1,
    }


def test_a_record_goes_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    given = Execution(clip_norm=0.0, compute_dtype="bfloat16", digest_every=7, barrier=False)
    cut = Batching(target_dims=1)
    verify(schemes.dapple(2, 2), linears(), mean, [[batch()]], optimizer=sgd, execution=given, batching=cut)
    assert calls.reference is not None
    assert (calls.reference[1]["clip_norm"], calls.reference[1]["compute_dtype"]) == (None, torch.bfloat16)
    assert calls.pipeline is not None
    assert calls.pipeline[0][-1]["execution"] == given.but(timeout_seconds=120.0)
    assert calls.pipeline[0][-1]["batching"] == cut


@pytest.mark.parametrize("option", ["autocast", "compute_dtype"])
def test_low_precision_computes_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, threads: int, option: str
) -> None:
    calls = Calls(monkeypatch)
    lower: dict[str, Any] = {option: torch.bfloat16}
    verify(schemes.dapple(2, 2), linears(), mean, [[batch()]], optimizer=sgd, **lower)
    assert calls.pipeline is not None
    assert (calls.threads, calls.pipeline[1]["threads"], torch.get_num_threads()) == (1, 1, threads)


def test_old_weights_are_of_the_stages_that_the_pipeline_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By given cuts, by costs, or by estimates: 8 + 1 + 1 operations are cut after the first."""
    calls = Calls(monkeypatch)
    layers = [nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1), nn.Linear(1, 1)]

    def cuts(**options: Any) -> tuple[int, ...]:
        verify(schemes.pipedream(2), layers, mean, [[batch()]], optimizer=sgd, **options)
        assert calls.reference is not None
        found: tuple[int, ...] = calls.reference[1]["staleness"].cuts
        return found

    assert cuts() == (1,)
    assert cuts(costs=[1, 1, 1, 3]) == (3,)
    assert cuts(costs=[1, 1, 1, 3], cuts=(2,)) == (2,)


class Loss(nn.Module):
    """Has a weight of its own, and one of the first layer's."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=D))
        self.shared = other.get_parameter("bias")

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean(output, target) * self.scale + (self.shared**2).sum()


def test_threads_train_copies_and_processes_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    layers = linears()
    loss = Loss(layers[0])
    for transport, copied in (("local", True), ("strict-nccl", True), ("gloo", False), ("nccl", False)):
        verify(
            schemes.dapple(2, 2),
            layers,
            loss,
            [[batch()]],
            optimizer=sgd,
            transport=transport,
        )
        assert calls.pipeline is not None
        _, _, its_layers, its_loss, _, _ = calls.pipeline[0]
        assert [mine is theirs for mine, theirs in zip(layers, its_layers, strict=True)] == [not copied] * 2
        assert (its_loss is loss) == (not copied)
        assert its_loss.shared is its_layers[0].bias
        assert calls.pipeline[1]["transport"] == transport


def test_a_reference_at_hand_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    given = TrainingResult([], 2.0, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    found = verify(schemes.dapple(2, 2), linears(), mean, [[batch()]], optimizer=sgd, reference=given)
    assert calls.reference is None
    assert found.loss_error == 0.5


class Dropped(nn.Module):
    """A layer with random draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Dropout(0.5))

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.inner(value)
        return found


BATCHES = [[batch(number)] for number in range(4)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: schemes.dapple(2, 2), {"seed": 3, "scheduler": slower, "clip_norm": 0.1}),
        (lambda: schemes.pipedream(2), {"flush_after": (1,), "cuts": (1,)}),
        (lambda: schemes.pipedream_2bw(2, 2), {"flush_after": (0, 2), "cuts": (1,), "clip_norm": 0.1}),
    ],
    ids=["dapple", "pipedream", "2bw"],
)
def test_a_pipeline_agrees(make: Callable[[], Any], options: dict[str, Any]) -> None:
    layers = [Dropped(), Dropped()]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    found = verify(make(), layers, mean, BATCHES, optimizer=sgd, transport="strict-local", **options)
    assert found.ok, found
    assert found.tolerance == 1e-10
    after = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))


def test_the_gradients_of_every_weight_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[TrainingResult, list[TrainingResult]]] = []

    def look(reference: TrainingResult, found: list[TrainingResult]) -> TrainingAgreement:
        seen.append((reference, found))
        return compare(reference, found)

    monkeypatch.setattr(training_agreement, "compare", look)
    for schedule in (schemes.dapple(2, 2), schemes.pipedream(2)):
        assert verify(schedule, linears(), mean, BATCHES, optimizer=sgd, cuts=(1,)).ok
        reference, found = seen.pop()
        names = {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert reference.gradients.keys() == names
        assert {name for worker in found for name in worker.gradients} == names
        assert [len(worker.steps) for worker in found] == [4, 4]


def test_replicas_have_their_own_mini_batches() -> None:
    rows = [[batch(number), batch(number + 9)] for number in range(2)]
    found = verify(schemes.dapple(2, 2), linears(), mean, rows, optimizer=sgd)
    assert found.ok, found


def test_a_seed_of_the_record_goes_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    verify(schemes.dapple(2, 2), linears(2), mean, [[batch()]], optimizer=sgd, execution=Execution(seed=3))
    assert calls.reference is not None
    assert calls.pipeline is not None
    assert calls.reference[1]["seed"] == calls.pipeline[0][-1]["execution"].seed == 3
