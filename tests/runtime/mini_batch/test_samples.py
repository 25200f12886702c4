"""What of a mini-batch is cut, where, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from counterflow.errors import ConfigError
from counterflow.runtime.mini_batch.samples import cut, samples_in
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule

from ...kit import linears, run, sgd

SCHEMES = [
    schemes.gpipe(2, 2),
    schemes.dapple(2, 2),
    schemes.chimera(2, 4, concat="forward-doubling"),
    schemes.chimera(2, 2, concat="backward-halving"),
]


def outputs_only(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def test_samples_are_counted_where_they_are_said_to_be() -> None:
    x, mask = torch.zeros(6, 3), torch.zeros(3, 3)
    assert samples_in(x) == 6
    assert samples_in({"x": x, "scale": 2.0, "name": "a", "more": [None, torch.tensor(1.0)]}) == 6
    assert samples_in(x, 1) == 3
    assert samples_in((x, mask), (0, None)) == 6
    assert samples_in({"x": x, "mask": mask}, {"x": 1, "mask": 0}) == 3
    assert samples_in((x, ["a"] * 6), (0, 0)) == 6
    assert samples_in({"x": x, "mask": mask}, {"mask": None, "x": 0}) == 6
    assert samples_in([{"x": x, "mask": mask}], [{"mask": 1, "x": 1}]) == 3


@pytest.mark.parametrize(
    ("tree", "dims", "message"),
    [
        ((torch.zeros(6, 3), torch.zeros(3, 3)), 0, r"found 3 in inputs\[1\] and 6 in inputs\[0\]"),
        (
            {"x": torch.zeros(6), "y": torch.zeros(6, 2)},
            1,
            r"inputs\['x'\] of shape \(6,\) has no",
        ),
        ({"scale": 2.0}, 0, "must have a tensor with samples; found a dict of 'scale'"),
        (
            (torch.zeros(4), ["a", "b", "c", "d"]),
            0,
            r"inputs\[1\] has 4 entries",
        ),
        ((torch.zeros(4), torch.Generator()), 0, r"inputs\[1\] is a torch._C.Generator, and it is not known"),
        ((torch.zeros(4), torch.zeros(4)), (0, 0, 0), r"input_dims=\(0, 0, 0\) does not fit the inputs"),
    ],
)
def test_what_cannot_be_cut_is_refused(tree: object, dims: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        samples_in(tree, dims)


def test_cut() -> None:
    x, mask, rows = torch.arange(12).view(4, 3), torch.zeros(3, 3), slice(1, 3)
    assert torch.equal(cut(x, rows), x[1:3])
    assert torch.equal(cut(x, slice(0, 2), 1), x[:, :2])
    part: Any = cut({"x": x, "mask": mask, "one": torch.tensor(1.0), "size": (7, 9), "f": 0.5}, rows, {
        "x": 0, "mask": None, "one": 0, "size": None, "f": None,
    })  # fmt: skip
    assert torch.equal(part["x"], x[1:3])
    assert part["mask"] is mask
    assert part["one"].dim() == 0
    assert (part["size"], part["f"]) == ((7, 9), 0.5)
    assert cut((x, ["a", "b", "c", "d"]), rows, (0, 0))[1] == ["b", "c"]
    assert cut((x, ("a", "b")), rows)[1] == ("a", "b")  # not as many as samples: no samples


class Attend(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        x, mask = given
        q = super().forward(x)[:, None]
        found: Tensor = flex_attention(q, q, x[:, None], block_mask=mask)[:, 0]
        return found


def _evaluated(layers: list[nn.Module], schedule: Schedule, inputs: Any, targets: Any) -> float:
    return Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd).evaluate(inputs, targets).loss


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_a_mask_by_blocks_is_cut_with_its_samples(schedule: Schedule) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([16, 40, 30, 64])
    mask = create_block_mask(
        lambda b, _, q, kv: (kv <= q) & ((q < ends[b]) == (kv < ends[b])), 4, 1, 64, 64, "cpu", BLOCK_SIZE=16
    )
    layers = [Attend(16, 16), nn.Linear(16, 16)]
    x, y = torch.randn(4, 64, 16), torch.randn(4, 64, 16)
    with torch.no_grad():
        true = nn.functional.mse_loss(layers[1](layers[0]((x, mask))), y).item()
    for told in run(_evaluated, layers, schedule, (x, mask), y):
        assert told == pytest.approx(true, rel=1e-6)


class Added(nn.Linear):
    """Takes the sequence first, and something without samples."""

    def forward(self, given: Any) -> Tensor:
        found: Tensor = super().forward(given["x"].transpose(0, 1)) + given["table"]
        return found


def _with_dims(layers: list[nn.Module], schedule: Schedule, inputs: Any, targets: Tensor, mode: Any) -> Any:
    pipeline = Pipeline(
        layers, nn.functional.mse_loss, schedule, optimizer=sgd, recompute=mode,
        input_dims={"x": 1, "table": None}, target_dims=1,
    )  # fmt: skip
    return [pipeline.step(inputs, targets).loss for _ in range(2)], pipeline.model_state_dict()


@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
def test_samples_in_other_dimensions(schedule: Schedule) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Added(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)]

    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x).transpose(0, 1)
            return found

    layers[1] = Turned(4, 4, dtype=torch.float64)
    inputs = {
        "x": torch.randn(3, 8, 4, dtype=torch.float64),  # three steps of eight samples
        "table": torch.randn(3, 4, dtype=torch.float64),
    }
    targets = torch.randn(3, 8, 4, dtype=torch.float64)
    model = nn.Sequential(*layers)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = sgd(list(model.parameters()))
    losses = []
    for _ in range(2):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    for told, found in run(_with_dims, layers, schedule, inputs, targets, "none"):
        assert told == pytest.approx(losses, rel=1e-10)
        for name, tensor in trained.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def _one_step(layers: list[nn.Module], schedule: Schedule, batches: Any) -> None:
    pipeline = Pipeline(layers, outputs_only, schedule, optimizer=sgd)
    for inputs, targets in batches:
        pipeline.step(inputs, targets)


@pytest.mark.parametrize("schedule", [*SCHEMES, schemes.pipedream(2)], ids=str)
@pytest.mark.parametrize("before", [0, 2])
def test_inputs_and_targets_of_other_lengths_are_refused(schedule: Schedule, before: int) -> None:
    good, bad = torch.zeros(8, 4, dtype=torch.float64), torch.zeros(32, 4, dtype=torch.float64)
    batches = [(good, good)] * before + [(good, bad)]
    with pytest.raises(ConfigError, match="32"):
        run(_one_step, linears(2), schedule, batches)


def _refilled(layers: list[nn.Module], schedule: Schedule, refills: bool, **options: Any) -> Any:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd, **options)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.zeros(8, 4, dtype=torch.float64) for _ in range(2))
    for _ in range(6):
        if not refills:
            x, y = (torch.empty(8, 4, dtype=torch.float64) for _ in range(2))
        x.normal_(generator=generator)
        y.normal_(generator=generator)
        pipeline.step(x, y)
    return pipeline.model_state_dict()


@pytest.mark.table
@pytest.mark.parametrize("mode", ["none", "stage", "layer"])
@pytest.mark.parametrize(
    "schedule", [schemes.pipedream(4), schemes.pipedream_2bw(4, 4), schemes.dapple(4, 4)], ids=str
)
def test_the_user_may_fill_the_memory_of_a_mini_batch_anew(schedule: Schedule, mode: Any) -> None:
    once, again = (
        run(partial(_refilled, recompute=mode), linears(4), schedule, refills, workers=4)[0]
        for refills in (False, True)
    )
    for name, tensor in once.items():
        assert torch.equal(again[name], tensor)


def _own_draws(layers: list[nn.Module], schedule: Schedule, differs_at: int, what: str, every: int) -> None:
    pipeline = Pipeline(
        layers, nn.functional.mse_loss, schedule, optimizer=sgd, digest_every=every, timeout_seconds=30
    )
    for step in range(4):
        mine = pipeline.worker if step == differs_at else 0
        x, y = (torch.full((8, 4), 1.0 + (mine if what == name else 0)) for name in ("inputs", "targets"))
        pipeline.step(x.double(), y.double())


@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize("differs_at", [0, 2])
@pytest.mark.parametrize(
    "schedule",
    [schemes.dapple(2, 4), schemes.chimera(2, 2), schemes.pipedream(2), schemes.pipedream_2bw(2, 2)],
    ids=str,
)
def test_threads_that_are_given_other_mini_batches_are_refused(
    schedule: Schedule, differs_at: int, what: str
) -> None:
    message = f"step {differs_at}: the {what} of ranks 0 and 1 have .* all workers of a replica get the same"
    with pytest.raises(ConfigError, match=message):
        run(_own_draws, linears(2), schedule, differs_at, what, 0)


def test_processes_that_are_given_other_mini_batches_are_refused() -> None:
    job = linears(2), schemes.dapple(2, 2), 2, "targets", 2
    with pytest.raises(ConfigError, match=r"step 2: the targets of ranks 0 and 1 have .* all workers of a"):
        launch(_own_draws, *job, workers=2, transport="gloo", timeout_seconds=30)


def test_workers_that_read_nothing_may_be_given_what_has_no_content() -> None:
    run(_given_where_read, linears(2), schemes.dapple(2, 2))


def _given_where_read(layers: list[nn.Module], schedule: Schedule) -> None:
    pipeline = Pipeline(layers, nn.functional.mse_loss, schedule, optimizer=sgd)
    data, nothing = (
        torch.ones(8, 4, dtype=torch.float64),
        torch.ones(8, 4, dtype=torch.float64, device="meta"),
    )
    pipeline.step(*((data, nothing) if pipeline.worker == 0 else (nothing, data)))
