"""Checkpoints through the documented calls: read under any layout, refused where they do not fit."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import counterflow as cf
from counterflow.checkpoints import files
from counterflow.checkpoints.index import INDEX
from counterflow.checkpoints.reader import Checkpoint
from counterflow.checkpoints.saver import Saver
from counterflow.errors import ConfigError, CounterflowError
from counterflow.runtime.workers.launch import launch
from counterflow.schedule.ir import Schedule


def run(work: Any, *args: object, workers: int = 2) -> list[Any]:
    return launch(work, *args, workers=workers, transport="local", timeout_seconds=30)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    undecayed = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.05}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.1, weight_decay=0.1)


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)


def model(tied: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64, bias=i < 3) for i in range(4)]
    if tied:
        layers[3].weight = layers[0].weight
    return nn.Sequential(
        layers[0], nn.Dropout(0.3), layers[1], nn.LayerNorm(4, dtype=torch.float64), *layers[2:]
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).mean(dim=1).mean()


def trained(
    schedule: Schedule, steps: range, start: Path | None, out: Path | None, **options: Any
) -> dict[str, Any]:
    options = {"optimizer": adamw, "scheduler": halved, "seed": 3 if start is None else 4} | options
    pipeline = cf.Pipeline(options.pop("model", model()), loss, schedule, **options)
    if start is not None:
        assert cf.load_checkpoint(pipeline, start) == steps.start
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64).chunk(pipeline.replicas, 1)[
            pipeline.replica
        ]
        pipeline.step(x, y)
    if out is not None:
        assert cf.save_checkpoint(pipeline, out) == out / f"step-{steps.stop}"
    return pipeline.state_dict()


@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        (cf.schemes.dapple(4, 4), 1, {}),
        (cf.schemes.gpipe(1, 4), 1, {"recompute": "layer"}),
        (cf.schemes.chimera(2, 2), 2, {"sync": "end"}),
        (cf.schemes.hanayo(2, 4), 1, {"barrier": False}),
    ],
    ids=str,
)
def test_a_checkpoint_is_read_under_any_layout(
    tmp_path: Path, schedule: Schedule, replicas: int, options: dict[str, Any]
) -> None:
    workers = schedule.workers * replicas
    uninterrupted = run(trained, schedule, range(5), None, None, workers=workers)[0]
    run(trained, cf.schemes.chimera(2, 4), range(2), None, tmp_path)
    launched = launch(
        _with,
        options,
        schedule,
        range(2, 5),
        tmp_path,
        workers=workers,
        transport="local",
        timeout_seconds=30,
    )
    resumed = launched[0]
    assert (resumed["step"], resumed["seed"]) == (5, 3)
    torch.testing.assert_close(resumed["model"], uninterrupted["model"], rtol=1e-12, atol=1e-12)
    for name, expected in uninterrupted["optimizer"].items():
        slots = resumed["optimizer"][name]
        torch.testing.assert_close(slots["state"], expected["state"], rtol=1e-11, atol=1e-12)
        assert slots["options"] == expected["options"]
    assert resumed["scheduler"] == uninterrupted["scheduler"]


def _with(options: dict[str, Any], schedule: Schedule, steps: range, start: Path) -> Any:
    return trained(schedule, steps, start, None, **options)


def test_sharded_state_is_read_unsharded_and_the_other_way_round(tmp_path: Path) -> None:
    uninterrupted = run(trained, cf.schemes.dapple(2, 4), range(5), None, None)[0]
    legs = [
        (cf.schemes.chimera(4, 4), range(2), 1, 1),
        (cf.schemes.dapple(2, 4), range(2, 3), 1, 0),
        (cf.schemes.chimera(2, 4), range(3, 4), 1, 1),
        (cf.schemes.gpipe(1, 2), range(4, 5), 2, 1),
    ]
    start, result = None, {}
    for schedule, steps, replicas, zero_stage in legs:
        work = partial(trained, schedule, steps, start, tmp_path, zero_stage=zero_stage)
        result = run(work, workers=schedule.workers * replicas)[0]
        start = tmp_path / f"step-{steps.stop}"
        written = [load_file(path).keys() for path in start.glob("optimizer-*")]
        assert len(written) > 1
        assert sum(map(len, written)) == len(set().union(*written)) == 3 * len(uninterrupted["optimizer"])
    torch.testing.assert_close(result["model"], uninterrupted["model"], rtol=1e-12, atol=1e-12)
    for name, slots in uninterrupted["optimizer"].items():
        torch.testing.assert_close(result["optimizer"][name]["state"], slots["state"], rtol=1e-11, atol=1e-12)
        assert result["optimizer"][name]["options"] == slots["options"]


def test_names_are_the_models_own(tmp_path: Path) -> None:
    run(trained, cf.schemes.chimera(2, 4), range(1), None, tmp_path)
    plain = model().load_state_dict(cf.load_weights(tmp_path))
    assert not plain.missing_keys
    weights: dict[str, Tensor] = {}
    for file in (tmp_path / "step-1").glob("model-*.safetensors"):
        part = load_file(file)
        assert weights.keys().isdisjoint(part)
        weights |= part
    assert weights.keys() == model().state_dict().keys() - {"5.weight"}  # the tied one is there once


def averaged(out: Path) -> list[dict[str, Any]]:
    """Weights, averages and what the optimiser keeps, after two steps and a checkpoint."""
    options: dict[str, Any] = {"optimizer": adamw, "scheduler": halved, "zero_stage": 1}
    pipeline = cf.Pipeline(model(), loss, cf.schemes.chimera(2, 4), **options)
    pipeline.ema(0.5)
    for _ in range(2):
        pipeline.step(*torch.ones(2, 8, 4, dtype=torch.float64))
    cf.save_checkpoint(pipeline, out)
    slots = pipeline.state_dict()["optimizer"]
    return [
        pipeline.model_state_dict(),
        {
            f"{name}.ema": value
            for name, value in pipeline.model_state_dict(ema=True).items()
            if name in slots
        },
        {f"{name}.{slot}": value for name in slots for slot, value in slots[name]["state"].items()},
    ]


def test_torch_reads_the_files_too(tmp_path: Path) -> None:
    weights, averages, slots = run(averaged, tmp_path)[0]
    del weights["5.weight"]  # the tied one is there once
    assert not torch.equal(weights["0.weight"], averages["0.weight.ema"])
    expected = {**weights, **averages, **slots}
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-2")), no_dist=True)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_precision_is_converted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = run(trained, cf.schemes.dapple(2, 4), range(2), None, tmp_path)[0]

    def lower() -> Any:
        pipeline = cf.Pipeline(
            model().bfloat16(), loss, cf.schemes.dapple(2, 4), optimizer=adamw, scheduler=halved
        )
        cf.load_checkpoint(pipeline, tmp_path)
        pipeline.step(*torch.ones(2, 8, 4, dtype=torch.bfloat16))
        return pipeline.state_dict()

    with caplog.at_level(logging.WARNING):
        result = run(lower)[0]
    assert any(
        "are float64 there and bfloat16 in this pipeline: converted" in text for text in caplog.messages
    )
    for slots in result["optimizer"].values():
        assert slots["state"]["exp_avg"].dtype == torch.bfloat16
    assert result["step"] == state["step"] + 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    run(trained, cf.schemes.dapple(2, 4), range(1), None, tmp_path)

    def reads(layers: nn.Sequential, optimizer: Any = adamw) -> None:
        cf.load_checkpoint(cf.Pipeline(layers, loss, cf.schemes.dapple(2, 4), optimizer=optimizer), tmp_path)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    wide = model(tied=False)
    wide[4] = nn.Linear(4, 5, dtype=torch.float64)
    for layers, optimizer, message in (
        (wide, adamw, r"4\.weight has shape \(4, 4\), \(5, 4\) in the pipeline"),
        (
            nn.Sequential(*model(), nn.Linear(4, 4, dtype=torch.float64)),
            adamw,
            r"has no '6\.weight'; load it",
        ),
        (
            model(),
            sgd,
            "contains the state of AdamW, not of SGD; give the same optimiser, or load the weights",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            run(reads, layers, optimizer)
    with pytest.raises(ConfigError, match="no such file or folder"):
        cf.load_weights(tmp_path / "none")


class Counting(torch.optim.SGD):
    """Keeps what is no tensor for each weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def counting(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1, momentum=0.5)


@pytest.mark.parametrize("way", ["checkpoint", "state"])
@pytest.mark.parametrize("in_list", [False, True])
def test_names_of_one_weight_with_different_values_are_refused(
    tmp_path: Path, *, in_list: bool, way: str
) -> None:
    """An untied run's state, which has the same names, in a model that ties them; equal values fit."""

    def made(*, tied: bool) -> cf.Pipeline:
        layers: Any = model(tied)
        return cf.Pipeline([*layers] if in_list else layers, loss, cf.schemes.dapple(2, 2), optimizer=adamw)

    def work(*, equal: bool) -> None:
        untied, tied = made(tied=False), made(tied=True)
        state = untied.model_state_dict()
        assert not torch.equal(state["0.weight"], state["5.weight"])
        if equal:
            state["5.weight"] = state["0.weight"].clone()
            untied.load_model_state_dict(state)
        if way == "checkpoint":
            cf.load_checkpoint(tied, cf.save_checkpoint(untied, tmp_path / str(equal)))
        else:
            tied.load_model_state_dict(state)
        for name, value in tied.model_state_dict().items():
            assert torch.equal(value, state[name]), name

    run(partial(work, equal=True))
    with pytest.raises(ConfigError, match=r"weight and ..weight are one weight of the model and two in"):
        run(partial(work, equal=False))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_an_optimizer_keeps_that_is_no_tensor(tmp_path: Path, zero_stage: int) -> None:
    chimera, options = cf.schemes.chimera(2, 4), {"optimizer": counting, "zero_stage": zero_stage}
    written = run(partial(trained, chimera, range(2), None, tmp_path, scheduler=None, **options))[0]
    state = Checkpoint.load(tmp_path, "run").optimizer
    assert state.keys() == written["optimizer"].keys() == dict(model().named_parameters()).keys()
    for name, slots in written["optimizer"].items():
        torch.testing.assert_close(state[name], slots["state"], rtol=0, atol=0)
        assert state[name]["count"] == 2
    read = partial(trained, cf.schemes.gpipe(1, 4), range(2, 3), tmp_path, None, scheduler=None)
    resumed = run(partial(read, optimizer=counting), workers=1)[0]
    assert {slots["state"]["count"] for slots in resumed["optimizer"].values()} == {3}


class Setting:
    """What no file can hold."""


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    def work() -> None:
        pipeline = cf.Pipeline(model(), loss, cf.schemes.dapple(1, 4), optimizer=adamw)
        pipeline.optimizers[0].param_groups[0]["setting"] = Setting()
        cf.save_checkpoint(pipeline, tmp_path)

    with pytest.raises(
        ConfigError,
        match=r"options/0\.weight contains an object that a checkpoint does not support; use only numbers",
    ):
        run(work, workers=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last = 0: the last checkpoint is kept; give 1 or more, or None"),
        ({"keep_last": -1}, "keep_last = -1: the last"),
        (
            {"note": "x", "rate": torch.ones(())},
            r"cannot store the entry 'rate', a Tensor .*; give texts, Pyth",
        ),
    ],
)
def test_options_that_a_checkpoint_does_not_support(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(partial(noted, tmp_path, options), workers=1)
    assert not list(tmp_path.iterdir())


def noted(out: Path, options: dict[str, Any]) -> None:
    """Saves a checkpoint with these options."""
    cf.save_checkpoint(cf.Pipeline(model(), loss, cf.schemes.dapple(1, 4), optimizer=adamw), out, **options)


def test_entries_of_a_checkpoint_read_back(tmp_path: Path) -> None:
    """Non-finite numbers, too."""
    entries = {"diverged": math.nan, "most": math.inf, "least": -math.inf, "list": [1, 0.5, "x", None, True]}
    run(partial(noted, tmp_path, entries | {"validation_loss": math.nan}), workers=1)
    about = Checkpoint.load(tmp_path, "run").index.about
    assert math.isnan(about.pop("diverged"))
    assert math.isnan(about.pop("validation_loss"))
    del entries["diverged"]
    assert about == entries


def test_buffers_that_are_conjugate_views(tmp_path: Path) -> None:
    """Their memory has other values than they have."""
    values = torch.tensor([1 + 2j, 3 - 1j]).conj()

    def work() -> None:
        layers = model()
        layers[0].register_buffer("conjugate", values)
        layers[0].register_buffer("negative", values.imag)
        cf.save_checkpoint(
            cf.Pipeline(layers, loss, cf.schemes.chimera(2, 2), optimizer=adamw), tmp_path / "run"
        )

    run(work)
    weights = cf.load_weights(tmp_path / "run")
    assert weights["0.conjugate"].tolist() == [1 - 2j, 3 + 1j]
    assert weights["0.negative"].tolist() == [-2, 1]
    files.write_tensors(tmp_path / "a", files.sizes_of({"a": values}), {"a": values}.__getitem__)
    assert load_file(tmp_path / "a")["a"].tolist() == values.tolist()


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    def work() -> None:
        pipeline = cf.Pipeline(model(), loss, cf.schemes.dapple(1, 4), optimizer=adamw)
        saver = Saver(pipeline, tmp_path, keep_last=1, keep_best=True)
        for value in (math.nan, 0.5, 0.7, math.nan):
            saver.start({"validation_loss": value})
            saver.wait()
            pipeline.step(*torch.ones(2, 8, 4, dtype=torch.float64))

    run(work, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_a_limit_on_files_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    """As a full disk does, or a quota: what is there says so, and nothing half-written is left."""

    def work() -> Any:
        pipeline = cf.Pipeline(model(), loss, cf.schemes.dapple(1, 4), optimizer=adamw)
        cf.save_checkpoint(pipeline, tmp_path)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        pipeline.step(*torch.ones(2, 8, 4, dtype=torch.float64))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        try:
            with pytest.raises(
                CounterflowError, match=r"cannot write a checkpoint of step 1: .*File too large"
            ):
                cf.save_checkpoint(pipeline, tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    run(work, workers=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-0"]
    assert cf.load_weights(tmp_path)


def gone_back(root: str, keep_last: int | None, start: int, *, other_version: bool) -> dict[str, Any]:
    """Trains to step 4 with a checkpoint of each step, then from ``start`` to step 2 otherwise."""
    before, after, resumed = (
        cf.Pipeline(model(), loss, cf.schemes.gpipe(1, 4), optimizer=adamw, seed=number)
        for number in range(3)
    )
    for _ in range(4):
        before.step(*torch.ones(2, 8, 4, dtype=torch.float64))
        cf.save_checkpoint(before, root)
    if other_version:
        path = Path(root) / "step-4" / INDEX
        data = json.loads(path.read_bytes())["checkpoint"] | {"format_version": 5}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"digest": digest, "checkpoint": data}))
    if start:
        cf.load_checkpoint(after, f"{root}/step-{start}")
    while after.steps < 2:
        after.step(*torch.zeros(2, 8, 4, dtype=torch.float64))
        path = cf.save_checkpoint(after, root, keep_last=keep_last)
        assert (path / INDEX).exists()
    if not other_version:
        assert cf.load_checkpoint(resumed, root) == 2
    return {
        "names": sorted(entry.name for entry in Path(root).iterdir()),
        "after": after.model_state_dict(),
        "resumed": resumed.model_state_dict(),
    }


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(
    ("keep_last", "remaining"), [(None, ["step-1", "step-2"]), (2, ["step-1", "step-2"]), (1, ["step-2"])]
)
def test_going_back_abandons_later_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep_last: int | None, remaining: list[str], start: int
) -> None:
    """In a program that resumes from an earlier checkpoint, or starts again in its folder."""
    [result] = run(partial(gone_back, str(tmp_path), keep_last, start, other_version=False), workers=1)
    abandoned = [f"abandoned-step-{step}" for step in range(2 if not start else 3, 5)]
    assert result["names"] == [*abandoned, *remaining]
    torch.testing.assert_close(result["resumed"], result["after"], rtol=0, atol=0)
    assert any(f"step-4 is of later steps than step {start + 1}" in line for line in caplog.messages)


def test_a_later_checkpoint_of_another_version_takes_no_place(tmp_path: Path) -> None:
    [result] = run(partial(gone_back, str(tmp_path), 1, 1, other_version=True), workers=1)
    assert result["names"] == ["abandoned-step-3", "step-2", "step-4"]


def one_that_thaws(root: str) -> list[set[str]]:
    """What is in the folder while a saver of before writes beside the one that came after it, and later."""
    pipeline = cf.Pipeline(model(), loss, cf.schemes.gpipe(1, 4), optimizer=adamw, scheduler=halved)
    before, after = (Saver(pipeline, Path(root)) for _ in range(2))
    for saver in (after, before):
        saver.start({})
        assert saver._thread is not None
        saver._thread.join()
    during = {path.name for path in Path(root).iterdir()}
    assert after.wait() is not None
    then = {path.name for path in Path(root).iterdir()}
    Saver(pipeline, Path(root))
    return [during, then, {path.name for path in Path(root).iterdir()}]


def test_one_that_thaws_writes_into_no_others_draft(tmp_path: Path) -> None:
    [(during, then, last)] = run(one_that_thaws, str(tmp_path), workers=1)
    assert len(during) == 2
    assert len(then & during) == 1
    assert then - during == last == {"step-0"}


def one_that_is_over(root: str, answers: int) -> list[str]:
    """What is in the folder after a saver was told so many times that nobody else writes there, and why."""
    pipeline = cf.Pipeline(model(), loss, cf.schemes.gpipe(1, 4), optimizer=adamw, scheduler=halved)
    answers_left = iter([False] * answers)
    saver = Saver(pipeline, Path(root), over=lambda: next(answers_left, True))
    saver.start({})
    outcome = saver.wait()
    assert outcome is not None
    return [path.name for path in Path(root).iterdir()] + [outcome.problem]


@pytest.mark.parametrize("answers", range(4))
def test_one_whose_attempt_is_over_leaves_no_draft(tmp_path: Path, answers: int) -> None:
    """Whenever it is told: when its draft is there, when its files are, before the index, and after."""
    [outcome] = run(one_that_is_over, str(tmp_path), answers, workers=1)
    assert outcome == ["others write there by now, or the run has ended"]


def test_one_whose_attempt_goes_on_is_complete(tmp_path: Path) -> None:
    [outcome] = run(one_that_is_over, str(tmp_path), 4, workers=1)
    assert outcome == ["step-0", ""]
