"""Copies to host memory beside the training: nothing before it was waited for, never parts of two steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.checkpoints.host_copies import _SLAB_BYTES, HostCopies, StateHostCopy, _targets
from counterflow.checkpoints.memory_copies import MemoryCopies
from counterflow.checkpoints.memory_file import opened
from counterflow.checkpoints.saver import Saver
from counterflow.checkpoints.state_tables import at_hand
from counterflow.runtime.parameters.weights import Weights
from counterflow.runtime.workers.launch import launch
from counterflow.runtime.workers.world import current_transport
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.device_memory import CopyError
from counterflow.testing.strict_nccl.operator_modes import computing

from .test_pipelines import adamw, loss


@pytest.fixture
def device() -> Any:
    fake = Device(0, lambda _launches, _why: None)
    with computing(fake.stream, fake):
        yield fake.handle


def test_there_is_nothing_before_it_is_waited_for(device: torch.device) -> None:
    tensors = {"a": torch.ones(3, device=device), "step": torch.tensor(2.0)}
    copy = HostCopies(device).begin(tensors)
    assert copy.tensors["a"].is_pinned()
    assert copy.tensors["a"].isnan().all()
    assert copy.tensors["step"].item() == 2  # memory of the host
    copy.wait()
    assert copy.tensors["a"].tolist() == [1, 1, 1]


def test_a_change_is_ordered_behind_the_copy(device: torch.device) -> None:
    tensor = torch.ones(3, device=device)
    copies = HostCopies(device)
    copy = copies.begin({"a": tensor})
    copy.order()
    tensor.add_(1)
    copy.wait()
    assert copy.tensors["a"].tolist() == [1, 1, 1]
    repeated = copies.begin({"a": tensor})
    assert repeated.tensors["a"].data_ptr() == copy.tensors["a"].data_ptr()
    tensor.add_(1)
    with pytest.raises(CopyError, match="changed while another stream copied it"):
        repeated.wait()


def test_what_a_forward_may_change_is_copied_before_that_runs(device: torch.device) -> None:
    weight, buffer = torch.ones(2, device=device), torch.ones(2, device=device)
    copy = HostCopies(device).begin({"weight": weight, "buffer": buffer}, {"buffer"})
    buffer.add_(1)
    copy.wait()
    assert copy.tensors["buffer"].tolist() == [1, 1]
    assert copy.tensors["weight"].tolist() == [1, 1]


def test_a_cpu_makes_them_at_once() -> None:
    tensor = torch.ones(3)
    copy = HostCopies(torch.device("cpu")).begin({"a": tensor})
    tensor.add_(1)
    assert copy.tensors["a"].tolist() == [1, 1, 1]


def test_memory_is_taken_in_few_pieces() -> None:
    tensors = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "none": torch.zeros(0, 5),
        "one": torch.zeros((), dtype=torch.float64),
        "complex": torch.zeros(2, 3, dtype=torch.complex64),
        "half": torch.zeros(5, 7, dtype=torch.bfloat16).t(),
        "large": torch.empty(_SLAB_BYTES + 1, dtype=torch.int8, device="meta"),
    }
    targets = _targets(tensors, pinned=False)
    assert {key: (t.dtype, t.shape) for key, t in targets.items()} == {
        key: (t.dtype, t.shape) for key, t in tensors.items()
    }
    assert len({t.untyped_storage().data_ptr() for key, t in targets.items() if t.numel()}) == 2
    for number, key in enumerate(k for k in targets if k != "large"):
        targets[key].fill_(number + 1)
    assert all(
        (targets[key] == number + 1).all() for number, key in enumerate(k for k in targets if k != "large")
    )


class Counting(nn.Module):
    """A buffer that each forward changes, and a weight that each forward changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        self.calls = self.calls.add_(1)  # in place
        return x


def pipeline_(**options: Any) -> cf.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64), Counting(), nn.Linear(4, 4, dtype=torch.float64)]
    return cf.Pipeline(layers, loss, cf.schemes.dapple(2, 4), optimizer=adamw, cuts=[2], **options)


def steps(pipeline: cf.Pipeline, number: int) -> None:
    for _ in range(number):
        pipeline.step(*torch.randn(2, 8, 4, dtype=torch.float64))


def state(pipeline: cf.Pipeline) -> dict[str, Tensor]:
    return {key: tensor.cpu().clone() for key, tensor in at_hand(pipeline)[0].items()}


def late(copies: HostCopies) -> threading.Event:
    """Let who waits for a copy do so when the event is set: the training has gone on by then."""
    gone_on, begin = threading.Event(), copies.begin

    def begin_(*arguments: Any) -> StateHostCopy:
        gone_on.clear()
        copy = begin(*arguments)
        wait = copy.wait
        copy.wait = lambda: wait() if gone_on.wait(30) else None  # type: ignore[method-assign]
        return copy

    copies.begin = begin_  # type: ignore[method-assign, assignment]
    return gone_on


def save_beside(out: str) -> list[dict[str, Tensor]]:
    """The state at two checkpoints, each with steps made beside it."""
    pipeline, states = pipeline_(), []
    saver = Saver(pipeline, Path(out))
    gone_on = late(saver._copies)
    steps(pipeline, 1)
    for _ in range(2):
        states.append(state(pipeline))
        saver.start({}, overlap=True)
        steps(pipeline, 2)
        gone_on.set()
        saver.wait()
        assert saver.last is not None
        assert not saver.last.problem
    return states


@pytest.mark.parametrize("transport", ["local", "strict-nccl"])
def test_a_checkpoint_is_of_the_step_after_which_it_was_begun(
    tmp_path: Path, transport: Literal["local", "strict-nccl"]
) -> None:
    by_worker = launch(save_beside, str(tmp_path), workers=2, transport=transport, timeout_seconds=30)
    for number, step in enumerate((1, 3)):
        folder = tmp_path / f"step-{step}"
        pipeline = launch(read, str(folder), workers=2, transport="local", timeout_seconds=30)
        for states, stored in zip(by_worker, pipeline, strict=True):
            torch.testing.assert_close(stored, states[number], rtol=0, atol=0)


def read(folder: str) -> dict[str, Tensor]:
    pipeline = pipeline_()
    steps(pipeline, 1)  # so that there is state of the optimiser
    cf.load_checkpoint(pipeline, folder)
    return state(pipeline)


def keep_beside(root: str) -> list[tuple[dict[str, Tensor], tuple[int, dict[str, Tensor]]]]:
    pipeline, states = pipeline_(), []
    memory = MemoryCopies(current_transport(), "run", [2], root=Path(root))
    gone_on = late(memory._copies)
    steps(pipeline, 1)
    for _ in range(3):
        current = state(pipeline)
        memory.keep(pipeline, [])
        steps(pipeline, 1)
        gone_on.set()
        memory.settle()
        rank = pipeline.transport.rank
        copies = [entry for path in sorted(memory.folder.glob(f"rank-{rank}.*")) if (entry := opened(path))]
        about, tensors = max(copies, key=lambda entry: int(entry[0]["step"]))
        states.append((current, (about["step"], {key: tensor.clone() for key, tensor in tensors.items()})))
    memory.clear()
    return states


@pytest.mark.parametrize("transport", ["local", "strict-nccl"])
def test_a_copy_in_memory_is_of_the_step_after_which_it_was_begun(
    tmp_path: Path, transport: Literal["local", "strict-nccl"]
) -> None:
    for result in launch(keep_beside, str(tmp_path), workers=2, transport=transport, timeout_seconds=30):
        assert [step for _, (step, _) in result] == [1, 2, 3]
        for states, (_, copy) in result:
            torch.testing.assert_close(copy, states, rtol=0, atol=0)


@pytest.mark.parametrize("work", [save_beside, keep_beside])
def test_an_update_that_does_not_wait_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    """The pretended device tells of it: so the tests above would."""
    monkeypatch.setattr(Weights, "change_after", lambda *_: None)
    with pytest.raises((cf.WorkerError, AssertionError), match="changed while another stream copied it"):
        launch(work, str(tmp_path), workers=2, transport="strict-nccl", timeout_seconds=30)
