"""Sums in bfloat16 and in 8 bits with error feedback: against plain torch, bounded, saved, refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.checkpoints import load_checkpoint, save_checkpoint
from counterflow.execution import SENT_SHARES, Execution, why_in_full
from counterflow.runtime.parameters.compressed_sums import (
    BLOCK,
    CODECS,
    CompressedSum,
    SumCompression,
    refuse_uncompressed,
)
from counterflow.runtime.workers.world import current_transport
from counterflow.training import load_config
from counterflow.training.trial import small_trial

NAMES = sorted(CODECS)
S = cf.schemes


def rounded(numbers: Tensor, name: str) -> Tensor:
    """Numbers as they are received, in plain torch; of 8 bits whole blocks."""
    if name == "bfloat16":
        return numbers.bfloat16().float()
    blocks = numbers.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return torch.where(scale == 0, 0.0, (blocks / scale).round() * scale).view(-1)


class Reference:
    """The same sum of all workers in one process, share by share."""

    def __init__(self, workers: int, size: int, name: str) -> None:
        multiple = BLOCK if name == "int8" else 1
        self.size, self.name = size, name
        self.share = -(-size // (workers * multiple)) * multiple
        self.residuals = torch.zeros(workers, workers * self.share)

    def sum(self, gradients: Sequence[Tensor]) -> Tensor:
        padded = torch.zeros_like(self.residuals)
        for row, gradient in zip(padded, gradients, strict=True):
            row[: self.size] = gradient
        wanted = padded + self.residuals
        sent = torch.stack([rounded(row, self.name) for row in wanted])
        self.residuals = wanted - sent
        found = torch.zeros(len(sent) * self.share)
        for worker in range(len(sent)):
            mine = slice(worker * self.share, (worker + 1) * self.share)
            total = sent[0, mine].clone()
            for row in sent[1:]:
                total += row[mine]
            found[mine] = rounded(total, self.name)
            self.residuals[worker, mine] += total - found[mine]
        return found[: self.size]


def on_threads(gradients: Tensor, name: str) -> list[tuple[Tensor, Tensor]]:
    """Sums and residuals of each step, by rank: gradients are ``[rank, step, value]``."""

    def work() -> tuple[Tensor, Tensor]:
        transport, compression = current_transport("local"), SumCompression(name)
        group = transport.group(range(len(gradients)))
        residual, sums = torch.zeros(gradients.shape[2]), []
        for gradient in gradients[transport.rank]:
            numbers = gradient.clone()
            summed = CompressedSum(numbers, residual, compression, group, transport)
            summed.add_up()
            summed.wait()
            sums.append(numbers)
        return torch.stack(sums), residual

    return cf.launch(work, workers=len(gradients), transport="local")


def test_what_is_lost_is_sent_later() -> None:
    """127 and 0.4 of two workers: of 0.8 a step the first sends nothing, and 4 of 5 steps send 1 in all."""
    gradients = torch.zeros(2, 5, 2)
    gradients[:, :, 0] = 63.5
    gradients[:, :, 1] = torch.tensor([0.125, 0.0625]).unsqueeze(1)
    for sums, residual in on_threads(gradients, "int8"):
        assert sums[:, 0].tolist() == [127.0] * 5
        # A step of each worker's scale is 0.5; the total's is 1, and rounds 0.5 to 0.
        assert sums[:, 1].sum().item() + 0.0 == round(sums[:, 1].sum().item())
        assert residual[0] == 0
    lost = sum(residual[1].item() for _, residual in on_threads(gradients, "int8"))
    assert lost + sums[:, 1].sum().item() == 5 * (0.125 + 0.0625)
    assert abs(lost) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_plain_torch_and_lose_nothing_for_good(name: str) -> None:
    """Bitwise on all of three workers, over ten steps; errors do not grow, and residuals have them all."""
    torch.manual_seed(0)
    gradients = torch.randn(3, 10, 1000) * torch.logspace(-4, 3, 1000)
    gradients[1, 3:6, :300] = 0
    found = on_threads(gradients, name)
    reference, bound = Reference(3, 1000, name), 2.0**-6 if name == "bfloat16" else 1 / 30
    for step in range(10):
        expected = reference.sum(list(gradients[:, step]))
        assert all(torch.equal(sums[step], expected) for sums, _ in found)
        lost = gradients[:, : step + 1].double().sum((0, 1)) - found[0][0][: step + 1].double().sum(0)
        largest = gradients.abs().amax((0, 1)) if name == "bfloat16" else gradients.abs().amax()
        assert (lost.abs() <= 3 * 4 * bound * largest).all()
    for rank, (_, residual) in enumerate(found):
        assert torch.equal(residual, reference.residuals[rank, :1000])
    assert torch.allclose(sum(row.double() for _, row in found), lost, atol=1e-2, rtol=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_codecs(name: str) -> None:
    codec = CODECS[name]
    torch.manual_seed(1)
    rows = torch.randn(2, 3 * BLOCK) * 10.0 ** torch.randint(-30, 30, (2, 3 * BLOCK))
    rows[0, :BLOCK] = 0
    rows[1, :BLOCK] = 1e-45  # a scale that is zero
    message = codec.encode(rows)
    assert message.dtype is torch.uint8
    assert message.nbytes == SENT_SHARES[name] * rows.nbytes
    found = codec.decode(message)
    assert found.dtype is torch.float32
    assert not found[0, :BLOCK].any()
    scales = rows.view(2, 3, BLOCK).abs().amax(-1, keepdim=True)
    off = (found - rows).view(2, 3, BLOCK).abs()
    bound = rows.view(2, 3, BLOCK).abs() * 2.0**-8 if name == "bfloat16" else scales / 254 * 1.001
    assert (off <= bound + 1e-38).all()
    for odd in (float("inf"), float("-inf"), float("nan")):
        rows[0, 5] = odd
        assert not codec.decode(codec.encode(rows))[0, 5].isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_leave_residuals_alone(name: str) -> None:
    gradients = torch.full((2, 3, 4), 0.3)
    gradients[1, 1, 2] = float("nan")
    gradients[0, 1, 0] = float("inf")
    for sums, residual in on_threads(gradients, name):
        assert not sums[1, 0].isfinite()
        assert not sums[1, 2].isfinite()
        assert sums[[0, 2]].isfinite().all()
        assert residual.isfinite().all()


def _layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]


def _batches(replica: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7 + replica)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(steps)]


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(schedule: cf.Schedule, steps: int, begin: Any = None, first: int = 0, **options: Any) -> Any:
    """State after some steps, on every worker."""
    with cf.Pipeline(
        _layers(4), nn.functional.mse_loss, schedule, optimizer=SGD, digest_every=1, **options
    ) as pipeline:
        if isinstance(begin, Path):
            load_checkpoint(pipeline, begin)
        elif begin is not None:
            pipeline.load_state_dict(begin)
        for inputs, targets in _batches(pipeline.replica, first + steps)[first:]:
            pipeline.step(inputs, targets)
        pipeline.flush()
        return copy.deepcopy(pipeline.state_dict())


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if hasattr(one, "state"):
        return same(one.state, other.state) and bool(one.options == other.options)
    return bool(one == other)


@pytest.mark.parametrize("name", NAMES)
def test_replicas_train_as_plain_torch_with_the_same_quantisation(name: str) -> None:
    """Two replicas of two stages: each stage's gradients are one row, weight before bias."""
    schedule = S.gpipe(2, 2)
    state = cf.launch(trained, schedule, 4, gradient_compression=name, workers=4, transport="local")[0]
    layers = _layers(4)
    stages = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    model = nn.Sequential(*stages)
    optimizer = SGD(model.parameters())
    references = [Reference(2, sum(p.numel() for p in stage.parameters()), name) for stage in stages]
    for batch in zip(*(_batches(replica, 4) for replica in range(2)), strict=True):
        rows = []
        for inputs, targets in batch:
            model.zero_grad()
            for begin in (0, 4):  # micro-batches
                loss = nn.functional.mse_loss(model(inputs[begin : begin + 4]), targets[begin : begin + 4])
                (loss / 4).backward()
            rows.append([torch.cat([p.grad.flatten() for p in s.parameters()]) for s in stages])  # type: ignore[union-attr]
        for stage, reference, each in zip(stages, references, zip(*rows, strict=True), strict=True):
            total = reference.sum(each)
            for parameter in stage.parameters():
                parameter.grad = total[: parameter.numel()].view(parameter.shape)
                total = total[parameter.numel() :]
        optimizer.step()
    for ours, theirs in zip(
        (v for v in state["model"].values() if isinstance(v, Tensor)), model.parameters(), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_off_by_default() -> None:
    plain = cf.launch(trained, S.chimera(4, 4), 2, workers=4, transport="local")[0]
    again = cf.launch(trained, S.chimera(4, 4), 2, gradient_compression=None, workers=4, transport="local")[0]
    assert same(plain, again)
    assert "residual" not in plain


def _resumed(schedule: cf.Schedule, folder: Path, options: dict[str, Any]) -> Any:
    whole = trained(schedule, 5, **options)
    half = trained(schedule, 3, **options)
    by_state = trained(schedule, 2, half, 3, **options)
    with cf.Pipeline(_layers(4), nn.functional.mse_loss, schedule, optimizer=SGD, **options) as pipeline:
        pipeline.load_state_dict(half)
        path = save_checkpoint(pipeline, folder)
    by_checkpoint = trained(schedule, 2, path, 3, **options)
    return whole, by_state, by_checkpoint, half


@pytest.mark.parametrize(
    ("schedule", "workers", "options"),
    [
        (S.chimera(4, 4), 4, {"gradient_compression": "int8", "zero_stage": 1}),
        (S.gpipe(2, 2), 4, {"gradient_compression": "bfloat16", "barrier": False}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    schedule: cf.Schedule, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole, by_state, by_checkpoint, half = cf.launch(
        _resumed, schedule, tmp_path, options, workers=workers, transport="local"
    )[0]
    assert same(whole, by_state)
    assert same(whole, by_checkpoint)
    assert any(row.any() for ranks in half["residual"].values() for row in ranks.values())
    without = {key: value for key, value in half.items() if key != "residual"}
    other = cf.launch(trained, schedule, 2, without, 3, workers=workers, transport="local", **options)[0]
    assert not same(whole["model"], other["model"])  # the residuals count


def test_residuals_of_other_workers_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"gradient_compression": "bfloat16"}

    def saved() -> tuple[Path, Any]:
        with cf.Pipeline(
            _layers(4), nn.functional.mse_loss, S.gpipe(2, 2), optimizer=SGD, **options
        ) as pipeline:
            pipeline.step(*_batches(pipeline.replica, 1)[0])
            return save_checkpoint(pipeline, tmp_path), pipeline.state_dict()

    path, state = cf.launch(saved, workers=4, transport="local")[0]
    for begin in (path, state):
        for schedule, workers in ((S.gpipe(2, 2), 6), (S.chimera(4, 4), 4)):
            with pytest.raises(
                cf.CounterflowError, match=r"residuals of .* of ranks \[.*leave out gradient_com"
            ):
                cf.launch(trained, schedule, 1, begin, workers=workers, transport="local", **options)
    caplog.set_level(logging.WARNING)
    cf.launch(trained, S.gpipe(2, 2), 1, path, workers=4, transport="local")
    cf.launch(trained, S.gpipe(4, 2), 1, state, workers=4, transport="local")
    assert "sums gradients in full" in caplog.text
    plain = cf.launch(trained, S.gpipe(2, 2), 1, workers=4, transport="local")[0]
    cf.launch(trained, S.gpipe(2, 2), 1, plain, workers=4, transport="local", **options)
    assert "they begin with zero" in caplog.text


@pytest.mark.parametrize(("schedule", "replicas"), [(S.chimera(4, 4), 2), (S.gpipe(2, 2), 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_tied_weights_trains_nearly_as_one_process(
    schedule: cf.Schedule, replicas: int, name: str
) -> None:
    """Copies are compared bitwise after every step; errors are those that ``verify`` expects."""
    trial = small_trial(schedule, replicas=replicas, dtype=torch.float32)
    found = trial.verify(gradient_compression=name)
    assert found.ok, found
    assert found.gradient_error > 1e-4
    in_full = small_trial(schedule, replicas=replicas).verify(gradient_compression=name)
    assert in_full.tolerance == 1e-10  # float64
    assert in_full.ok, in_full


def test_what_does_not_go_with_it_is_refused() -> None:
    halves = Execution(gradient_compression="bfloat16")
    for execution, scheme, synchronous, why in (
        (halves, "wpipe", False, "updates each stage at its own time"),
        (Execution(gradient_compression="int8", loss_scale=8.0), "dapple", True, "a loss scale"),
        (Execution(gradient_compression="int8", autocast="float16"), "dapple", True, "a loss scale"),
    ):
        found = why_in_full(execution, scheme, synchronous=synchronous)
        assert found is not None
        assert why in found
    assert why_in_full(halves, "dapple", synchronous=True) is None
    with pytest.raises(cf.ConfigError, match="does not go with parallelize"):
        refuse_uncompressed(halves, S.dapple(2, 2), parallelized=True)
    with pytest.raises(cf.ConfigError, match="wpipe updates each stage at its own time"):
        cf.launch(trained, S.wpipe(4, 4), 1, gradient_compression="int8", workers=4, transport="local")
    with pytest.raises(cf.ConfigError, match="gradient_compression"):
        Execution(gradient_compression="int4")  # type: ignore[arg-type]
    for line, why in (
        ("train.memory_every=3", "which only checkpoints keep"),
        ("train.fewer_after=3", "which only checkpoints keep"),
        ("schedule.scheme='wpipe'", "updates each stage at its own time"),
    ):
        with pytest.raises(cf.ConfigError, match=why):
            load_config(sets=["pipeline.gradient_compression='int8'", line])
    assert not load_config(sets=["pipeline.gradient_compression='int8'"]).copies_in_memory


def test_unfrozen_weights_keep_their_residuals() -> None:
    def work() -> bool:
        with cf.Pipeline(
            _layers(4), nn.functional.mse_loss, S.gpipe(2, 2), optimizer=SGD, gradient_compression="int8"
        ) as pipeline:
            pipeline.step(*_batches(pipeline.replica, 1)[0])
            before = pipeline.state_dict()["residual"]
            pipeline.set_trainable(lambda name: "bias" not in name)
            frozen = pipeline.state_dict()["residual"]
            weights = {name: rows for name, rows in before.items() if "bias" not in name}
            return same(weights, frozen) and len(weights) == 4

    assert all(cf.launch(work, workers=4, transport="local"))
