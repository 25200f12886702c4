"""Whole runs: what they write, that their numbers do not depend on the schedule, how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from counterflow import ConfigError, load_weights
from counterflow.checkpoints.reader import Checkpoint
from counterflow.checkpoints.saver import Saver
from counterflow.errors import WorkerError
from counterflow.integrations.conversion import convert
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.formats import loads
from counterflow.training import live, load_config, loop
from counterflow.training.folder import FILES, RunFolder, read_metrics, read_timeline
from counterflow.training.job import Job, prepare
from counterflow.training.run import run
from counterflow.training.timeline import Timeline

from .conftest import Configure, Train, Watcher, losses


def test_what_a_run_writes_reads_back(
    config: Configure, drawn: list[tuple[Any, Path]], tmp_path: Path
) -> None:
    given = config(train__steps=6, train__evaluate_every=2, train__checkpoint_every=4)
    watcher = Watcher()
    done = run(given, watcher)
    assert done is not None
    summary, folder = done
    assert folder == tmp_path / "run"
    ((charts, path),) = drawn
    assert path == folder / "timeline.png"
    assert [chart.heading.split(":")[0] for chart in charts] == [
        f"measured, step {read_timeline(folder).step}",
        "predicted",
    ]
    path.touch()
    assert set(RunFolder(folder).files()) == {str(folder / name) for name in FILES}
    assert {entry.name for entry in folder.iterdir()} == set(FILES)  # and no drafts

    assert load_config(folder / "config.toml") == given
    assert loads((folder / "schedule.json").read_text(), "") == given.build_schedule()
    assert json.loads((folder / "summary.json").read_text()) == json.loads(
        json.dumps(dataclasses.asdict(summary))
    )

    lines = read_metrics(folder)
    assert lines == watcher.lines
    assert watcher.over == 1
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert set(steps[0]) == {
        *("step", "loss", "grad_norm", "learning_rate", "samples_per_second", "seconds"),
    }
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert summary.training_loss == pytest.approx(sum(line["loss"] for line in steps) / 6)
    assert summary.validation_loss == lines[-1]["validation_loss"]
    assert (summary.steps, summary.stopped, summary.sampled_steps) == (6, False, (3, 4, 5, 6))


def test_a_plan_places_workers_on_its_devices(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Pipeline:
        given.append(options["mesh"])
        return Pipeline(*arguments, **options)

    monkeypatch.setattr(loop, "Pipeline", noted)
    keys: dict[str, Any] = {"train__steps": 2, "pipeline__replicas": 2}
    train(**keys)
    train("placed", plan__devices=[3, 1, 2, 0], **keys)
    assert given == [None] * 4 + [[(3, 1), (2, 0)]] * 4
    assert losses(tmp_path / "placed") == pytest.approx(
        losses(tmp_path / "run"), rel=1e-6
    )  # other orders of sums
    with pytest.raises(
        ConfigError, match=r"plan.devices = \[0, 0\]: must contain each device from 0 on once"
    ):
        load_config(sets=["plan.devices=[0, 0]"])


@pytest.mark.parametrize(
    "damaged", [b"\x8f{", b'{"step" 3}', b"7", b'{"step": "x"}', b'{"step": 1e999, "seconds": 1}']
)
def test_damaged_metrics_do_not_end_a_run_that_goes_on(tmp_path: Path, damaged: bytes) -> None:
    whole = b'{"step": 1, "loss": 2.5, "seconds": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(damaged + b"\n" + whole)
    folder = RunFolder(tmp_path)
    assert folder.new_records() == [json.loads(whole)]
    assert folder.steps() == 1


def test_about(train: Train) -> None:
    watcher = Watcher()
    summary = train(watcher=watcher, train__steps=1, pipeline__replicas=2)
    about = summary.about
    assert watcher.about == about
    # embedding 256·16 + 16·16; a block 12·16² + 13·16; the head 2·16 + 256·16
    assert about.parameters == 4352 + 2 * (12 * 256 + 13 * 16) + 4128
    assert about.stage_layers == ((0, 2), (3, 3))
    assert (about.samples, about.processes, about.scheme) == (32, 4, "chimera")
    assert 3 < about.unigram_entropy < 3.5


def test_seconds_of_asynchronous_steps_add_up(train: Train, tmp_path: Path) -> None:
    """Those of calls that report no step are shared among the steps that are reported next."""
    summary = train(
        schedule__scheme="pipedream-2bw",
        schedule__stages=2,
        schedule__micro_batches=2,
        train__steps=8,
        train__evaluate_every=3,
    )
    samples = summary.about.samples
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 8
    seconds = sum(samples / line["samples_per_second"] for line in lines)
    assert seconds == pytest.approx(8 * samples / summary.samples_per_second, rel=1e-9)


@pytest.mark.parametrize(("mini_batch", "expected"), [(16, 5.0), (17, None)])
def test_what_a_plan_expected_of_this_mini_batch(
    train: Train, mini_batch: int, expected: float | None
) -> None:
    summary = train(train__steps=1, plan__mini_batch=mini_batch, plan__samples_per_second=5.0)
    assert summary.planned_samples_per_second == expected


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_saved_bytes_are_as_predicted(train: Train, recompute: str) -> None:
    summary = train(train__steps=2, pipeline__recompute=recompute)
    for pair in summary.saved_bytes:
        assert pair.measured == pytest.approx(pair.predicted, rel=0.02)
    assert len(summary.saved_bytes) == 2
    for memory, saved in zip(summary.memory_bytes, summary.saved_bytes, strict=True):
        assert memory.measured > memory.predicted > saved.predicted


@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_saved_bytes_of_slices_are_as_predicted(train: Train, recompute: str) -> None:
    summary = train(
        train__steps=2,
        model__dropout=0.0,
        schedule__scheme="1f1b",
        schedule__slices=2,
        pipeline__recompute=recompute,
    )
    for pair in summary.saved_bytes:
        assert pair.measured == pytest.approx(pair.predicted, rel=0.02)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_without_a_barrier_the_metrics_are_the_same(train: Train, clip_norm: float, tmp_path: Path) -> None:
    for name, barrier in (("with", True), ("without", False)):
        train(
            name,
            train__steps=9,
            train__evaluate_every=4,
            train__checkpoint_every=4,
            pipeline__barrier=barrier,
            pipeline__clip_norm=clip_norm,
        )
    kept = [
        [{k: v for k, v in line.items() if "second" not in k} for line in read_metrics(tmp_path / name)]
        for name in ("with", "without")
    ]
    assert [line["step"] for line in kept[1] if "loss" in line] == list(range(1, 10))
    assert kept[1] == kept[0]


def test_timeline(train: Train, tmp_path: Path) -> None:
    summary = train(train__steps=4, schedule__scheme="dapple")
    timeline = read_timeline(tmp_path / "run")
    assert isinstance(timeline, Timeline)
    assert timeline.step in summary.sampled_steps
    measured, predicted = timeline.measured(), timeline.predicted()
    assert measured.schedule == predicted.schedule
    assert 0 < measured.bubble_ratio < 1
    assert predicted.makespan == summary.ops_seconds.predicted
    assert measured.start.min() == 0
    path = tmp_path / "run" / "timeline.json"
    text = path.read_text()
    assert timeline.dumps() == text
    place = text.index('"F0.0", ') + len('"F0.0", ')
    texts_in_it = (text[:place] + '"soon", ' + text[text.index(" ", place) + 1 :],)
    swapped = (text.replace("F0.0", "F9.0"), text.replace('"memory"', '"more"'))
    for damaged in ("", "{}", text[:-20], *swapped, *texts_in_it):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"timeline\.json: not the timeline of a run, or damaged"):
            read_timeline(tmp_path / "run")
    path.unlink()
    with pytest.raises(
        ConfigError, match=r"this run has no timeline\.json: it is still in progress, or ended"
    ):
        read_timeline(tmp_path / "run")


def test_a_timeline_while_the_run_goes_on(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every step but the last, and of none that was evaluated; it is gone in the end."""
    shown = seen_live(monkeypatch)
    train(train__steps=5, train__evaluate_every=3)
    assert [timeline.step for timeline in shown] == [1, 2, 4]
    assert all(not one.ongoing and one.measured().makespan > 0 for one in shown)
    assert not (tmp_path / "run" / "live.json").exists()
    shown.clear()
    monkeypatch.setattr(live, "EVERY_SECONDS", 1e9)
    train("rare", train__steps=5)
    assert [timeline.step for timeline in shown] == [1]


def seen_live(monkeypatch: pytest.MonkeyPatch) -> list[Timeline]:
    """What is written for those who look, as often as it can be, and is read as they do."""
    shown: list[Timeline] = []
    put = RunFolder.put_live

    def kept(self: RunFolder, timeline: Timeline) -> None:
        put(self, timeline)
        shown.append(read_timeline(self.path))

    monkeypatch.setattr(RunFolder, "put_live", kept)
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(live, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(live, "_SHARE", 1e9)
    return shown


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule__scheme": "pipedream", "schedule__micro_batches": None},
        {"schedule__scheme": "wpipe", "schedule__stages": None, "schedule__workers": 2},
    ],
)
def test_two_steps_while_a_run_without_a_flush_goes_on(
    train: Train, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """All workers' ops of two steps, in the order in which the schedule has them."""
    shown = seen_live(monkeypatch)
    same = {"train__samples": 4, "model__layers": 4, "schedule__micro_batches": 2, "schedule__periods": 6}
    summary = train(train__steps=16, train__evaluate_every=13, **(same | changes))
    assert summary.steps == 16
    assert shown
    assert all(one.step <= 13 for one in shown)  # 16 is too near to where the pipeline was empty
    for one in shown:
        assert one.ongoing
        assert all(0 < side.parts["computing"] < side.seconds for side in one.sides())
        for rows in one.rows():
            assert all(row[i].end <= row[i + 1].start for row in rows for i in range(len(row) - 1))
        assert [chart.workers for chart in one.charts()] == [2, 2]


OTHERS: list[dict[str, Any]] = [
    {"schedule__scheme": "dapple"},
    {"schedule__scheme": "hanayo", "pipeline__cuts": [1, 2, 3], "schedule__stages": None},
    {"schedule__stages": 1, "schedule__scheme": "gpipe", "schedule__micro_batches": 4},
    {"pipeline__recompute": "layer", "pipeline__sync": "end"},
    {"pipeline__replicas": 2, "train__samples": 8, "schedule__micro_batches": 2},
]


def test_losses_are_the_same_whatever_the_schedule_and_width(train: Train, tmp_path: Path) -> None:
    same: dict[str, Any] = {"train__steps": 4, "model__dropout": 0.1, "schedule__micro_batches": 4}
    summary = train("first", **same)
    for number, other in enumerate(OTHERS):
        changes = same | other
        if changes.get("schedule__scheme") == "hanayo":
            changes |= {"schedule__workers": 2}
        found = train(f"{number}", **changes)
        assert losses(tmp_path / f"{number}") == pytest.approx(losses(tmp_path / "first"), rel=1e-5)
        assert found.validation_loss == pytest.approx(summary.validation_loss, rel=1e-5)


def _resumed(train: Train, folder: Path, other: dict[str, Any], **same: Any) -> None:
    """Train 6 steps at once, and 3 steps that are gone on from as ``other`` says."""
    same |= {"optimizer__schedule": "constant", "schedule__micro_batches": 4, "model__tied": True}
    train("whole", train__steps=6, **same)
    train("begun", train__steps=3, **same)
    checkpoint = {"train__resume": folder / "begun"}
    summary = train("resumed", train__steps=6, **(same | checkpoint | other))
    assert (summary.about.first_step, summary.steps) == (3, 6)
    assert summary.saved_bytes[0].measured > 0


def test_resumed_as_if_never_stopped(train: Train, tmp_path: Path) -> None:
    _resumed(train, tmp_path, {}, model__dropout=0.1)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    one, other = (Checkpoint.load(tmp_path / name, name) for name in ("whole", "resumed"))
    assert one.step == other.step == 6
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=0)
    torch.testing.assert_close(one.optimizer, other.optimizer, rtol=0, atol=0)


def test_resumed_under_another_schedule(train: Train, tmp_path: Path) -> None:
    other = {"schedule__scheme": "dapple", "pipeline__cuts": [1]}
    _resumed(train, tmp_path, other, optimizer__name="sgd", optimizer__momentum=0.9)
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    saved = [Checkpoint.load(tmp_path / name, name).optimizer for name in ("whole", "resumed")]
    torch.testing.assert_close(*saved, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_loads_into_the_model(train: Train, config: Configure, tmp_path: Path) -> None:
    """And the model then has the loss that the run told."""
    summary = train(train__steps=3)
    job = prepare(config())
    model = torch.nn.Sequential(*job.layers).to_empty(device="cpu").eval()
    model.load_state_dict(load_weights(tmp_path / "run"))
    with torch.no_grad():
        inputs, targets = job.bundle.batches.validation(loop._VALIDATION_SAMPLES)
        assert job.bundle.loss(model(inputs), targets).item() == pytest.approx(
            summary.validation_loss, rel=1e-5
        )


def test_what_a_checkpoint_is_made_of(train: Train, tmp_path: Path) -> None:
    train(train__steps=5, train__checkpoint_every=2)
    folder = tmp_path / "run" / "checkpoint"
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-4", "step-5"]
    kinds = ["model-{}.safetensors", "objects-{}.pt", "optimizer-{}.safetensors"]
    parts = {kind.format(rank) for kind in kinds for rank in range(2)}
    files = {"checkpoint.json", "metrics.jsonl"} | parts
    assert {entry.name for entry in (folder / "step-5").iterdir()} >= files - {"objects-1.pt"}
    models = [load_file(folder / "step-5" / f"model-{rank}.safetensors") for rank in range(2)]
    assert models[0].keys().isdisjoint(models[1])  # each worker writes its part
    for given in (tmp_path / "run", folder, folder / "step-5", folder / "step-5" / "checkpoint.json"):
        assert load_weights(given).keys() == models[0].keys() | models[1].keys()


def test_a_checkpoint_is_written_once_a_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    start = Saver.start

    def counting(saver: Saver, *rest: Any, **options: Any) -> None:
        saved.append(saver.pipeline.steps)
        start(saver, *rest, **options)

    monkeypatch.setattr(Saver, "start", counting)
    monkeypatch.setattr(loop.Trainer, "_stops", lambda _, done: done == 2)
    assert train(train__steps=9, train__checkpoint_every=2).stopped
    assert saved == [2, 2]  # by each of two workers
    assert Checkpoint.load(tmp_path / "run", "run").step == 2


def test_a_folder_that_a_worker_does_not_see(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists
    kept = threading.local()

    def blind(path: Path, **options: Any) -> bool:
        """On a disk of its own: what another thread wrote is not there."""
        mine = getattr(kept, "mine", ())
        return exists(path, **options) and (not re.fullmatch(r"\.[0-9a-f]{32}", path.name) or path in mine)

    def touch(path: Path, *rest: Any, **options: Any) -> None:
        kept.mine = (*getattr(kept, "mine", ()), path)
        path.write_bytes(b"")

    monkeypatch.setattr(Path, "exists", blind)
    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(ConfigError, match=r"rank 1 does not see .*run, where rank 0 writes .* train\.out"):
        train(train__steps=1)
    assert not list(tmp_path.glob("run/.*"))


def test_a_run_begins_with_a_file_that_has_a_tied_weight_once(train: Train, tmp_path: Path) -> None:
    train("tied", model__tied=True, train__steps=1)
    convert(tmp_path / "tied", tmp_path / "weights.safetensors")
    convert(tmp_path / "weights.safetensors", tmp_path / "begin")
    weights = load_weights(tmp_path / "tied")
    assert load_weights(tmp_path / "begin").keys() == weights.keys() - {"3.output.weight"}
    changes = {"train__steps": 1, "optimizer__learning_rate": 1e-9}
    train("again", model__tied=True, train__resume=tmp_path / "begin", **changes)
    again = load_weights(tmp_path / "again")
    assert again.keys() == weights.keys()
    torch.testing.assert_close(again["3.output.weight"], weights["0.tokens.weight"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__hidden": 32},
            r"0\.tokens\.weight has shape \(256, 16\), \(256, 32\) in the config's model",
        ),
        (
            {"model__layers": 3},
            r"only the config's model has '3\.attention\.output\.bias'; resume with the model of",
        ),
        ({"train__steps": 2}, r"it has made 2 steps, and train\.steps = 2; give train\.steps = 3 or more"),
        (
            {"optimizer__name": "sgd"},
            r"contains the state of optimizer\.name = adamw, not of sgd; give the same",
        ),
        ({"train__resume": "none"}, r"train\.resume = none: no such file or folder"),
        ({"train__resume": "."}, r"train\.resume = \.: is not a checkpoint, and contains no complete one"),
        ({"train__resume": __file__}, r"test_run\.py: is not a checkpoint, or damaged"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(
    train: Train, config: Configure, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    train("begun", train__steps=2)
    resumed = {"train__resume": tmp_path / "begun", "train__steps": 3} | changes
    with pytest.raises(ConfigError, match=message):
        run(config("resumed", **resumed), Watcher())
    assert not (tmp_path / "resumed").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule__scheme": "wpipe", "schedule__stages": None, "schedule__workers": 1},
        {"schedule__scheme": "pipedream", "schedule__micro_batches": None},
        {"schedule__scheme": "pipedream-2bw", "schedule__micro_batches": 2},
    ],
)
def test_without_a_flush(train: Train, tmp_path: Path, changes: dict[str, Any]) -> None:
    same = {"train__samples": 4, "model__layers": 4, "schedule__micro_batches": 2, "schedule__periods": 6}
    watcher = Watcher()
    summary = train(watcher=watcher, train__steps=14, train__evaluate_every=12, **(same | changes))
    lines = [line for line in watcher.lines if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 15))  # told late, but all of them
    assert [line["step"] for line in watcher.lines if "validation_loss" in line] == [12, 14]
    assert summary.timed_together == 6
    assert all(pair.measured == pair.predicted for pair in summary.stages_held)
    for pair in summary.saved_bytes:
        assert pair.measured == pytest.approx(pair.predicted, rel=0.02)
    timeline = read_timeline(tmp_path / "run")
    assert isinstance(timeline, Timeline)
    assert {span.op for span in timeline.spans} == set(timeline.schedule.ops())


def test_bert(train: Train) -> None:
    summary = train(model__kind="bert", train__steps=3)
    assert summary.training_loss > 0
    assert summary.about.parameters > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule__scheme": "pipedream", "schedule__micro_batches": None, "model__tied": True},
            r"model\.tied = true: pipedream updates each stage at its own time",
        ),
        ({"data__path": "nowhere.txt"}, r"nowhere\.txt: no such file or folder"),
        ({"model__positions": 200_000}, r"the help text that ships with Python: \d+ bytes are too short"),
    ],
)
def test_refused_before_anything_is_written(
    config: Configure, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(**changes), Watcher())
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_not_written_again(train: Train, tmp_path: Path) -> None:
    train(train__steps=1)
    with pytest.raises(
        ConfigError, match=r"run: contains a run already \(summary\.json\); name another folder"
    ):
        train(train__steps=1)
    assert len(losses(tmp_path / "run")) == 1


def test_a_folder_that_cannot_be_made(train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in ("file", "file/run"):
        with pytest.raises(ConfigError, match=r"is, or lies in, a file; results need a folder"):
            train(out, train__steps=1)


def test_folders_are_numbered(config: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        done = run(load_config(sets=[*_sets(config(train__steps=1)), "train.out="]), Watcher())
        assert done is not None
        assert done[1] == Path(f"runs/chimera-{number}")


def _sets(config: Any) -> list[str]:
    lines = config.to_toml().splitlines()
    section = ""
    sets = []
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            sets.append(f"{section}.{line.split('  #')[0]}")
    return sets


def test_a_loss_that_is_not_finite_keeps_the_metrics(train: Train, tmp_path: Path) -> None:
    watcher = Watcher()
    with pytest.raises(
        WorkerError, match=r"the loss is (nan|inf).*; the metrics of \d+ steps? are in .*run$"
    ):
        train(watcher=watcher, train__steps=50, optimizer__learning_rate=1e30, pipeline__clip_norm=0)
    assert losses(tmp_path / "run")
    assert read_metrics(tmp_path / "run") == watcher.lines
    assert watcher.over == 1


def test_a_validation_loss_that_is_not_finite(train: Train) -> None:
    with pytest.raises(
        WorkerError, match=r"^the validation loss is nan after 1 update; try a lower learning"
    ):
        train(
            train__steps=1,
            optimizer__learning_rate=1e30,
            optimizer__warmup_steps=0,
            optimizer__schedule="constant",
            pipeline__clip_norm=0,
        )


def test_a_run_that_fails_at_once_leaves_no_folder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr("counterflow.training.loop.measure_stages", fail)
    with pytest.raises(WorkerError, match=r"^worker \d: OSError: no more$"):
        train(train__steps=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("differs", "message"),
    [("config", r"train\.seed = 0 and 7"), ("data", "the data: the files differ")],
)
def test_workers_that_were_given_different_runs_are_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch, differs: str, message: str
) -> None:
    def prepare_(*args: Any) -> Job:
        job = prepare(*args)
        if current_transport().rank == 0:
            return job
        if differs == "data":
            return dataclasses.replace(job, bundle=dataclasses.replace(job.bundle, digest="other"))
        section = job.config.train.model_copy(update={"seed": 7})
        return dataclasses.replace(job, config=job.config.model_copy(update={"train": section}))

    monkeypatch.setattr("counterflow.training.loop.prepare", prepare_)
    with pytest.raises(ConfigError, match=f"^ranks 0 and 1 were given different runs: {message}; give"):
        train(train__steps=2)


def test_interrupted_after_the_step_in_flight(train: Train, tmp_path: Path) -> None:
    asked: list[float] = []

    def interrupt(line: dict[str, float]) -> None:
        if not asked and line["step"] >= 4:
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    summary = train(watcher=Watcher(interrupt), train__steps=100_000, train__evaluate_every=0)
    assert summary.stopped
    assert 4 <= summary.steps == len(losses(tmp_path / "run")) < 100_000
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    assert load_weights(tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
