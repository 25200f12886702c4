"""An average of the weights, against torch's own in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from counterflow.checkpoints import load_checkpoint, save_checkpoint
from counterflow.checkpoints.memory_copies import MemoryCopies
from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.parameters.ema import ExponentialAverage
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule
from counterflow.verification.reference import Reference, Staleness
from counterflow.verification.reference_parts import parts_of

DECAY, STEPS = 0.75, 4


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)]


def tied() -> list[nn.Module]:
    """The first and the last layer share a weight."""
    made = layers()
    made[-1].get_submodule("0").weight = made[0].get_submodule("0").weight
    return made


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def piped(schedule: Schedule, made: Callable[[], list[nn.Module]] = layers, **options: Any) -> Pipeline:
    return Pipeline(made(), nn.MSELoss(), schedule, optimizer=adam, digest_every=1, **options)


def alone(
    schedule: Schedule, made: Callable[[], list[nn.Module]] = layers, replicas: int = 1, **options: Any
) -> tuple[dict[str, Tensor], float]:
    """The average's state, and the loss of the first mini-batch with it, in one process."""
    cuts = options.pop("cuts", ())
    model = Reference(
        made(),
        nn.MSELoss(),
        parts_of(schedule),
        optimizer=adam,
        staleness=Staleness.of(schedule, cuts),
        **options,
    )
    modules = nn.ModuleList(layer.module for layer in model.layers)
    average = AveragedModel(modules, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(STEPS):
        model.step([batch(number)] * replicas)
        average.update_parameters(modules)
    state = average.module.state_dict()
    modules.load_state_dict(state)
    return state, model.evaluate([batch(0)] * replicas)


def trained(
    schedule: Schedule, made: Callable[[], list[nn.Module]], options: dict[str, Any]
) -> tuple[Any, ...]:
    pipeline = piped(schedule, made, **options)
    pipeline.ema(DECAY)
    for number in range(STEPS):
        pipeline.step(*batch(number))
    own = pipeline.model_state_dict()
    state = pipeline.model_state_dict(ema=True)
    with pipeline.averaged():
        loss = pipeline.evaluate(*batch(0)).loss
        outputs = pipeline.predict(batch(0)[0])
    local = pipeline.model_state_dict(local=True, ema=True)
    for name, value in pipeline.model_state_dict().items():
        assert torch.equal(value, own[name])
    pipeline.step(*batch(9))
    pipeline.flush()
    return state, loss, outputs, local, pipeline.cuts, dict(pipeline.stream_weights(1, ema=True))


CASES: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "chimera, sharded": (schemes.chimera(4, 4), {"zero_stage": 1}),
    "zero bubble, clipped, no barrier": (schemes.zb_h1(4, 4), {"barrier": False, "clip_norm": 0.01}),
    "pipedream-2bw": (schemes.pipedream_2bw(4, 4), {}),
    "pipedream": (schemes.pipedream(4, 4), {}),
}


ON_DEVICES = "chimera, sharded", "zero bubble, clipped, no barrier", "pipedream-2bw"


@pytest.mark.parametrize(
    ("case", "transport"),
    [*((case, "local") for case in CASES), *((case, "strict-nccl") for case in ON_DEVICES)],
)
def test_it_is_torchs(case: str, transport: Literal["local", "strict-nccl"]) -> None:
    schedule, options = CASES[case]
    rows = launch(
        trained, schedule, layers, options, workers=schedule.workers, transport=transport, timeout_seconds=60
    )
    clip = {"clip_norm": options["clip_norm"]} if "clip_norm" in options else {}
    expected, loss = alone(schedule, cuts=rows[0][4], **clip)
    model = nn.Sequential(*layers())
    model.load_state_dict(expected)
    for rank, (state, its, outputs, local, _, streamed) in enumerate(rows):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=2e-5, atol=1e-6)
        assert its == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(outputs, model(batch(0)[0]), rtol=1e-4, atol=1e-5)
        for name, value in local.items():
            assert torch.equal(value, state[name])
        assert streamed.keys() == (expected.keys() if rank == 1 else set())


@pytest.mark.table
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("schedule", [schemes.gpipe(2, 4), schemes.chimera(2, 4)], ids=str)
def test_replicas_and_tied_weights(schedule: Schedule, zero_stage: int) -> None:
    rows = launch(
        trained, schedule, tied, {"zero_stage": zero_stage}, workers=4, transport="local", timeout_seconds=60
    )
    expected, loss = alone(schedule, tied, replicas=2)
    for state, its, *_ in rows:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=2e-5, atol=1e-6)
        assert its == pytest.approx(loss, rel=1e-5)


def test_low_precision_is_averaged_in_float32() -> None:
    """Of a weight that moves by less than bfloat16 tells from it."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    average = ExponentialAverage(0.999, lambda _: [("0.weight", weight)], [0])
    expected = torch.ones(3)
    for step in range(50):
        with torch.no_grad():
            weight.fill_(1.0 + step / 128)
        average.update(0)
        expected = expected.lerp(weight.detach().float(), 0.001) if step else weight.detach().float()
    kept = average.of(0)["0.weight"].average
    assert kept.dtype is torch.float32
    torch.testing.assert_close(kept, expected)
    assert not torch.equal(kept, kept.bfloat16().float())
    assert average.nbytes == 12


@pytest.mark.parametrize("options", [{"compute_dtype": torch.bfloat16}, {"autocast": torch.bfloat16}])
def test_no_cast_of_the_weights_outlives_the_context(options: dict[str, Any]) -> None:
    def work() -> tuple[float, float, float]:
        pipeline = piped(schemes.dapple(2, 4), **options)
        pipeline.ema(DECAY)
        for number in range(STEPS):
            pipeline.step(*batch(number))
        before = pipeline.evaluate(*batch(0)).loss
        with pipeline.averaged():
            within = pipeline.evaluate(*batch(0)).loss
        return before, within, pipeline.evaluate(*batch(0)).loss

    for before, within, after in launch(work, workers=2, transport="local", timeout_seconds=30):
        assert before == after
        assert abs(within - before) > 1e-3


def test_a_skipped_update_and_a_step_without_one_leave_it() -> None:
    def work() -> list[dict[str, Any]]:
        pipeline = piped(schemes.dapple(2, 4), skip_non_finite=True)
        pipeline.ema(DECAY)
        pipeline.step(*batch(0))
        inputs, targets = batch(1)
        assert pipeline.step(inputs * float("nan"), targets).skipped
        pipeline.step(*batch(1), update=False)
        pipeline.step(*batch(2))
        other = piped(schemes.dapple(2, 4))
        other.ema(DECAY)
        other.step(*batch(0))
        other.step(*batch(1), update=False)
        other.step(*batch(2))
        return [pipeline.model_state_dict(ema=True), other.model_state_dict(ema=True)]

    for mine, other in launch(work, workers=2, transport="local", timeout_seconds=30):
        for name, value in other.items():
            torch.testing.assert_close(mine[name], value)


def _resumed(way: str, folder: Path, zero_stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    def made(schedule: Schedule) -> Pipeline:
        pipeline = piped(schedule, tied, zero_stage=zero_stage)
        pipeline.ema(DECAY)
        return pipeline

    pipeline, other = made(schemes.chimera(2, 4)), made(schemes.chimera(2, 4))
    for number in range(2):
        pipeline.step(*batch(number))
    if way == "state":
        other.load_state_dict(pipeline.state_dict())
    elif way == "checkpoint":
        load_checkpoint(other, save_checkpoint(pipeline, folder))
    else:
        memory = MemoryCopies(pipeline.transport, "run", pipeline.cuts, root=folder)
        memory.keep(pipeline, [])
        memory.settle()
        again = MemoryCopies(pipeline.transport, "run", pipeline.cuts, root=folder)
        found = again.find()
        assert found is not None
        again.restore(found, other)
    for number in range(2, STEPS):
        pipeline.step(*batch(number))
        other.step(*batch(number))
    return pipeline.model_state_dict(ema=True), other.model_state_dict(ema=True)


@pytest.mark.table
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("way", ["state", "checkpoint", "memory"])
def test_it_goes_on(way: str, zero_stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rows = launch(_resumed, way, tmp_path, zero_stage, workers=2, transport="local", timeout_seconds=60)
    for whole, resumed in rows:
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(resumed[name], value)
    assert not caplog.records


def test_a_checkpoint_goes_on_under_another_scheme(tmp_path: Path) -> None:
    def work() -> tuple[dict[str, Any], dict[str, Any]]:
        pipeline, other = piped(schemes.chimera(2, 4), zero_stage=1), piped(schemes.gpipe(2, 4), cuts=[3])
        for one in (pipeline, other):
            one.ema(DECAY)
        for number in range(STEPS):
            pipeline.step(*batch(number))
        load_checkpoint(other, save_checkpoint(pipeline, tmp_path))
        return pipeline.model_state_dict(ema=True), other.model_state_dict(ema=True)

    for state, found in launch(work, workers=2, transport="local", timeout_seconds=30):
        for name, value in state.items():
            assert torch.equal(found[name], value)


def test_with_and_without_one_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        pipeline, other = piped(schemes.dapple(2, 4)), piped(schemes.dapple(2, 4))
        pipeline.ema(DECAY)
        pipeline.step(*batch(0))
        other.load_state_dict(pipeline.state_dict())
        load_checkpoint(other, save_checkpoint(pipeline, tmp_path / "a"))
        pipeline.load_state_dict(other.state_dict())
        load_checkpoint(pipeline, save_checkpoint(other, tmp_path / "b"))
        averages, weights = pipeline.model_state_dict(ema=True), pipeline.model_state_dict()
        for name, value in averages.items():
            assert torch.equal(value, weights[name])

    with caplog.at_level(logging.WARNING):
        launch(work, workers=2, transport="local", timeout_seconds=30)
    told = [record.getMessage() for record in caplog.records]
    assert sum("it is not taken: call ema(decay) before" in line for line in told) == 4
    assert sum("has no average of the weights: it begins with those loaded" in line for line in told) == 4


FREEZING = (
    "",  # all are trained
    "7.",
    "7.",
    "",
    "4. 5. 6. 7.",  # a whole stage of two
    "0. 4. 5. 6. 7.",
    "0.",
    "",
)
"""The layers that are frozen in each step."""


def _choose(pipeline: Pipeline, layers_frozen: str) -> None:
    pipeline.set_trainable(lambda name: not any(name.startswith(layer) for layer in layers_frozen.split()))


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schemes.dapple(2, 4), {}),
        (schemes.chimera(2, 4), {"zero_stage": 1}),
        (schemes.dapple(2, 4), {"cuts": [7]}),  # the second stage has one layer, frozen as a whole
    ],
    ids=["dapple", "sharded", "last-layer"],
)
@pytest.mark.parametrize(
    ("resume_at", "way"), [(None, "state"), (2, "state"), (6, "state"), (6, "checkpoint")]
)
@pytest.mark.parametrize("frozen_first", [False, True])
def test_frozen_weights_go_on_in_their_averages(  # noqa: PLR0917
    schedule: Schedule,
    options: dict[str, Any],
    resume_at: int | None,
    way: str,
    frozen_first: bool,
    tmp_path: Path,
) -> None:
    """As in ``AveragedModel``: what is frozen later nears the weight, and a resumed run keeps that."""
    freezing = ("7.", *FREEZING) if frozen_first else FREEZING

    def work() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        def made(step: int) -> Pipeline:
            pipeline = piped(schedule, **options)
            _choose(pipeline, freezing[step])
            pipeline.ema(DECAY)
            return pipeline

        pipeline, rows = made(0), []
        for step, layers_frozen in enumerate(freezing):
            if step == resume_at:
                resumed = made(step)
                if way == "checkpoint":
                    load_checkpoint(resumed, save_checkpoint(pipeline, tmp_path))
                else:
                    resumed.load_state_dict(pipeline.state_dict())
                pipeline = resumed
            _choose(pipeline, layers_frozen)
            pipeline.step(*batch(step))
            averages = pipeline.model_state_dict(ema=True)
            rows.append((pipeline.model_state_dict(), averages))
            with pipeline.averaged():
                pass
            for name, value in pipeline.model_state_dict().items():
                assert torch.equal(value, rows[-1][0][name]), name
        return rows

    for rows in launch(work, workers=2, transport="local", timeout_seconds=60):
        model = nn.ModuleList(layers())
        expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for step, (weights, averages) in enumerate(rows):
            model.load_state_dict(weights)
            expected.update_parameters(model)
            for name, value in expected.module.state_dict().items():
                torch.testing.assert_close(averages[name], value, msg=f"{name}, step {step}")


def of_trained(parameters: Any) -> torch.optim.Optimizer:
    return adam([parameter for parameter in parameters if parameter.requires_grad])


def frozen_later(way: str, folder: Path, optimizer: Any) -> tuple[Any, Any]:
    """Averages of a run whose first layer is frozen when it begins, and of one that resumes it and freezes
    that layer after the pipeline is made and its average begins.
    """
    models = [nn.Sequential(*layers()) for _ in range(2)]
    models[0][0].requires_grad_(False)
    pipeline, resumed = (
        Pipeline(model, nn.MSELoss(), schemes.dapple(2, 4), optimizer=optimizer) for model in models
    )
    for each in (pipeline, resumed):
        each.ema(DECAY)
    _choose(resumed, "0.")
    pipeline.step(*batch(0))
    if way == "checkpoint":
        load_checkpoint(resumed, save_checkpoint(pipeline, folder))
    else:
        resumed.load_state_dict(pipeline.state_dict())
    for each in (pipeline, resumed):
        each.step(*batch(1))
    return pipeline.model_state_dict(ema=True), resumed.model_state_dict(ema=True)


@pytest.mark.parametrize("optimizer", [adam, of_trained])
@pytest.mark.parametrize("way", ["state", "checkpoint"])
def test_weights_that_are_frozen_before_a_load_need_no_state(
    way: str, optimizer: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    rows = launch(frozen_later, way, tmp_path, optimizer, workers=2, transport="local", timeout_seconds=60)
    for expected, averages in rows:
        torch.testing.assert_close(averages, expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["state", "checkpoint"])
def test_an_average_of_a_weight_that_is_frozen_keeps_its_precision(way: str, tmp_path: Path) -> None:
    def work() -> list[Tensor]:
        pipeline, resumed = (
            Pipeline(
                [nn.Linear(6, 6, dtype=torch.bfloat16)], nn.MSELoss(), schemes.gpipe(1, 4), optimizer=adam
            )
            for _ in range(2)
        )
        pipeline.ema(DECAY)
        for number in range(3):
            pipeline.step(*(part.bfloat16() for part in batch(number)))
        _choose(resumed, "0.")
        resumed.ema(DECAY)  # has no average of it before the load
        if way == "checkpoint":
            load_checkpoint(resumed, save_checkpoint(pipeline, tmp_path))
        else:
            resumed.load_state_dict(pipeline.state_dict())
        return [each.state_dict()["ema"]["0.weight"] for each in (pipeline, resumed)]

    [[expected, average]] = launch(work, workers=1, transport="local", timeout_seconds=60)
    assert expected.dtype == torch.float32
    assert not torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(average, expected)


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (lambda _: 1.0, "a decay of 1.0; give a number from 0"),
        (lambda rank: 0.5 + 0.1 * rank, "rank . with"),
    ],
)
def test_decays_that_are_refused(decay: Callable[[int], float], message: str) -> None:
    def work() -> None:
        pipeline = piped(schemes.dapple(2, 4))
        pipeline.ema(decay(pipeline.transport.rank))

    with pytest.raises(ConfigError, match=message):
        launch(work, workers=2, transport="local", timeout_seconds=30)


@pytest.mark.parametrize(
    "call", ["step", "model_state_dict", "load_model_state_dict", "state_dict", "averaged"]
)
def test_within_it_nothing_but_looking(call: str) -> None:
    def work() -> None:
        pipeline = piped(schemes.dapple(2, 4))
        state = pipeline.model_state_dict()
        pipeline.ema(DECAY)
        with pipeline.averaged():
            match call:
                case "step":
                    pipeline.step(*batch(0))
                case "averaged":
                    with pipeline.averaged():
                        pass
                case "load_model_state_dict":
                    pipeline.load_model_state_dict(state)
                case _:
                    getattr(pipeline, call)()

    with pytest.raises(ConfigError, match=r"within averaged\(\).* is model_state_dict\(ema=True\)"):
        launch(work, workers=2, transport="local", timeout_seconds=30)


def test_without_one_there_is_none_to_show() -> None:
    def work(ema: bool) -> None:
        pipeline = piped(schemes.dapple(2, 4))
        if ema:
            pipeline.model_state_dict(ema=True)
        with pipeline.averaged():
            pass

    for ema in (False, True):
        with pytest.raises(ConfigError, match="there is no average of the weights; call ema"):
            launch(work, ema, workers=2, transport="local", timeout_seconds=30)


def test_copies_whose_averages_differ_are_told() -> None:
    def work() -> None:
        pipeline = piped(schemes.chimera(2, 4))
        pipeline.ema(DECAY)
        pipeline.step(*batch(0))
        if pipeline.transport.rank == 1:
            average = pipeline.weights.average
            assert average is not None
            next(iter(average.of(0).values())).average.add_(1e-3)
        pipeline.step(*batch(1))

    with pytest.raises(WorkerError, match="copies of stage 0 on ranks 0 and 1 differ"):
        launch(work, workers=2, transport="local", timeout_seconds=30)
