"""A run that fails goes on by itself, from its workers' memory or its checkpoint; or ends with the reason."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from counterflow import ConfigError
from counterflow.checkpoints import memory_copies
from counterflow.checkpoints.index import CHECKPOINT, INDEX, complete
from counterflow.checkpoints.memory_copies import MemoryCopies, choose
from counterflow.checkpoints.memory_parts import Part
from counterflow.data.text_batches import NextByte
from counterflow.errors import WorkerError
from counterflow.measure.storage import storage_of
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.workers import world
from counterflow.runtime.workers.world import current_transport
from counterflow.training import loop
from counterflow.training.folder import METRICS, read_metrics
from counterflow.training.job import prepare
from counterflow.training.run import run
from counterflow.training.supervision.events import (
    BEGAN,
    FAILED,
    GAVE_UP,
    RESTARTED,
    STARTED,
    STOPPED,
    note,
    read,
    run_of,
)
from counterflow.training.supervision.restarts import Restarts, with_memory
from counterflow.training.supervision.stopping import STOP

from ..conftest import Configure, Train, Watcher, losses

STEPS = 7
FAILS_AT = 5


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where copies are, in place of the machine's memory; at the end there are none."""
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setattr(memory_copies, "ROOT", root)
    yield root
    assert not list(root.glob("*/*"))


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the mini-batch of a step raise so many times; what is done before."""

    def fails_(times: float = 1, before: Callable[[], None] = lambda: None) -> None:
        left = [times]
        batch = NextByte.batch

        def read_(self: NextByte, step: int, *args: Any, **options: Any) -> Any:
            if step == FAILS_AT and left[0] > 0 and current_transport().rank == 0:
                left[0] -= 1
                before()
                raise ValueError(f"a sample of {left[0]} is damaged")
            return batch(self, step, *args, **options)

        monkeypatch.setattr(NextByte, "batch", read_)

    return fails_


def lines(folder: Path) -> list[tuple[int, str]]:
    return [(int(line["step"]), "loss" if "loss" in line else "validation") for line in read_metrics(folder)]


def sources(folder: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["source"]) for event in read(folder) if event["event"] == RESTARTED]


def drop(root: Path, rank: int) -> None:
    """As when the machine of a worker is gone: its memory too."""
    found = list(root.glob(f"*/rank-{rank}.*"))
    assert found
    for path in found:
        path.unlink()


OPTIONS = {"train__steps": STEPS, "train__evaluate_every": 3, "train__checkpoint_every": 0}


@pytest.mark.parametrize(
    ("scheme", "replicas", "dropped", "zero_stage", "expected"),
    [
        ("chimera", 1, 0, 0, (5, "memory")),  # from its twin: there is no checkpoint
        ("chimera", 1, None, 1, (5, "memory")),
        ("chimera", 1, 0, 1, (0, "beginning")),  # its twin has the weights, and not its optimiser state
        ("dapple", 1, 1, 0, (0, "beginning")),  # nobody else has its stage
        ("dapple", 2, 1, 0, (5, "memory")),  # the other replica has it
    ],
)
def test_it_goes_on_as_if_nothing_had_been(  # noqa: PLR0917
    train: Train,
    fails: Callable[..., None],
    kept: Path,
    tmp_path: Path,
    scheme: str,
    replicas: int,
    dropped: int | None,
    zero_stage: int,
    expected: tuple[int, str],
) -> None:
    more = OPTIONS | {"schedule__scheme": scheme, "pipeline__replicas": replicas, "train__samples": 8}
    train("whole", **more)
    fails(before=lambda: None if dropped is None else drop(kept, dropped))
    more |= {"pipeline__zero_stage": zero_stage}
    watcher = Watcher()
    train("again", watcher, max_restarts=1, train__memory_every=1, **more)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")
    assert sources(tmp_path / "again") == [expected]
    failed = next(event for event in read(tmp_path / "again") if event["event"] == FAILED)
    assert (failed["attempt"], failed["step"], failed["worker"], failed["lost"]) == (0, 6, 0, False)
    assert len(watcher.events) == 2
    assert watcher.events[0].startswith("step 6 failed: worker 0: ValueError: a sample of 0 is damaged")


def test_memory_has_the_loss_scale(train: Train, fails: Callable[..., None], tmp_path: Path) -> None:
    more = OPTIONS | {"pipeline__autocast": "float16", "pipeline__loss_scale": 2.0**21}
    more["pipeline__loss_scale_interval"] = 2
    train("whole", **more)
    fails()
    train("again", max_restarts=1, train__memory_every=1, **more)
    assert sources(tmp_path / "again") == [(5, "memory")]
    told, wanted = (
        [
            (line.get("loss"), line.get("loss_scale"), "skipped" in line)
            for line in read_metrics(tmp_path / name)
        ]
        for name in ("again", "whole")
    )
    assert told == wanted
    assert {True, False} == {skipped for _, scale, skipped in wanted if scale}


def test_without_memory_it_goes_on_from_its_checkpoint(
    train: Train, fails: Callable[..., None], tmp_path: Path
) -> None:
    more = OPTIONS | {"train__checkpoint_every": 2}
    train("whole", **more)
    fails()
    train("again", max_restarts=1, **more)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    ((step, source),) = sources(tmp_path / "again")
    assert source == "checkpoint"
    assert step in (2, 4)  # the second one may not have been complete


@pytest.mark.parametrize(("memory_every", "expected"), [(0, {"checkpoint", "beginning"}), (1, {"memory"})])
def test_a_damaged_checkpoint_ends_no_run_that_restarts(
    train: Train,
    fails: Callable[..., None],
    tmp_path: Path,
    memory_every: int,
    expected: set[str],
) -> None:
    """From which step depends on what was written by then."""
    more = OPTIONS | {"train__checkpoint_every": 2}
    train("whole", **more)

    def damage() -> None:
        path = complete(tmp_path / "again" / CHECKPOINT)[-1] / INDEX
        path.write_bytes(path.read_bytes()[:-20])

    fails(before=damage)
    train("again", max_restarts=1, train__memory_every=memory_every, **more)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")
    assert {source for _, source in sources(tmp_path / "again")} <= expected


def test_as_often_as_time_allows(
    train: Train, fails: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "counterflow.training.run.with_memory", lambda config, _: config
    )  # as among processes
    train("whole", **OPTIONS, train__memory_every=0)
    fails()
    train("again", max_restarts=1, **OPTIONS)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    ((step, source),) = sources(tmp_path / "again")
    assert source == "memory"
    assert step in range(2, FAILS_AT + 1)  # later copies are made as steps take their time


@pytest.mark.parametrize(
    ("restarts", "changes", "every"),
    [
        (1, {}, None),
        (0, {}, 0),
        (1, {"train__memory_every": 3}, 3),
        (0, {"train__memory_every": 3}, 3),
        (1, {"pipeline__barrier": False}, 0),
        (1, {"pipeline__transport": "local"}, 0),
    ],
)
def test_copies_are_for_restarts(
    config: Configure, restarts: int, changes: dict[str, Any], every: int | None
) -> None:
    found = with_memory(config(**{"pipeline__transport": "gloo", **changes}), restarts)
    assert found.train.memory_every == every


def test_what_rank_0_had_no_time_to_write_is_written(
    train: Train, fails: Callable[..., None], tmp_path: Path
) -> None:
    def forget() -> None:
        path = tmp_path / "again" / METRICS
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + '{"step": 5')

    fails(before=forget)
    train("again", max_restarts=1, train__memory_every=1, **OPTIONS)
    assert [step for step, kind in lines(tmp_path / "again") if kind == "loss"] == [*range(1, STEPS + 1)]


def test_the_same_failure_twice_ends_the_run(
    train: Train, fails: Callable[..., None], tmp_path: Path
) -> None:
    fails(math.inf)
    with pytest.raises(WorkerError, match="damaged; step 6 failed twice in the same way") as caught:
        train("run", max_restarts=9, train__memory_every=1, **OPTIONS)
    assert "the metrics of 5 steps are in" in str(caught.value)
    events = [event["event"] for event in read(tmp_path / "run")]
    assert events.count(FAILED) == 2
    assert events[-1] == GAVE_UP


def test_a_loss_that_is_not_finite_ends_the_run(train: Train, tmp_path: Path) -> None:
    rates = {"optimizer__learning_rate": 1e30, "pipeline__clip_norm": 0, "optimizer__warmup_steps": 0}
    with pytest.raises(WorkerError, match="failed twice in the same way"):
        train("run", max_restarts=9, **OPTIONS, **rates)
    assert [event["event"] for event in read(tmp_path / "run")].count(FAILED) == 2


def test_what_was_lost_may_fail_as_often_as_is_allowed(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 2)
    failure = {"step": 6, "worker": 1, "message": "worker 1 was killed by SIGKILL", "lost": True}
    note(tmp_path, FAILED, **failure)
    note(tmp_path, STARTED, restarts=2)  # another command: what was before does not count
    note(tmp_path, FAILED, **failure)
    note(tmp_path, FAILED, **failure)
    assert restarts.refusal() is None
    note(tmp_path, FAILED, **failure)
    assert restarts.refusal() == "this was failure 3, and restarts were limited to 2"


def test_events_survive_a_line_that_is_not_whole(tmp_path: Path) -> None:
    note(tmp_path, STARTED, restarts=1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "fai')
    assert [event["event"] for event in read(tmp_path)] == [STARTED]


@pytest.mark.parametrize(
    "line",
    [
        b'["fai',
        b"[]",
        b'"failed"',
        b'{"event": "another", "time": "2026-11-22T12:05:03"}',
        b'{"event": "failed", "time": "2026-11-22T12:05:03", "step": "6", "message": "no", "lost": true}',
        b'{"event": "failed", "time": "soon", "step": 6, "message": "no", "lost": true}',
        b'{"event": ["failed"], "time": "2026-11-22T12:05:03"}',
        b'{"event": "began", "time": "2026-11-22T12:05:03", "run": 7}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_damaged_events_are_left_out(tmp_path: Path, line: bytes) -> None:
    note(tmp_path, STARTED, restarts=1)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    note(tmp_path, STOPPED, signal="SIGINT", step=3)
    assert [event["event"] for event in read(tmp_path)] == [STARTED, STOPPED]


def test_events_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"events\.jsonl: cannot be read: Is a directory"):
        read(tmp_path)


def test_the_name_of_a_run_leads_to_no_other_folder(tmp_path: Path) -> None:
    note(tmp_path, BEGAN, run="x/../../home")
    name = run_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert run_of(tmp_path) == name


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_folder_that_is_removed_ends_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int
) -> None:
    """The copies in memory go with it; see ``kept``."""
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.0)

    def remove(line: dict[str, float]) -> None:
        if line["step"] == 2:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(WorkerError, match="was removed while the run writes"):
        train("run", Watcher(remove), max_restarts, train__memory_every=1, train__steps=200)
    assert not (tmp_path / "run").exists()


def holding(
    step: int,
    name: str,
    digests: dict[Part, str],
    needed: Iterable[Part] = (),
    layout: tuple[int, ...] = (1,),
) -> memory_copies.MemoryCopy:
    return memory_copies.MemoryCopy(layout, step, name, digests, [], frozenset(needed))


@pytest.mark.parametrize("layout", [(1, 2), (1, 2, 3)])
def test_the_newest_step_that_every_stage_has(layout: tuple[int, ...]) -> None:
    seven: dict[Part, str] = {(0,): "a", (1,): "b"}
    six: dict[Part, str] = {(0,): "c", (1,): "d"}
    rows = [
        [holding(7, "rank-0.0", seven, layout=layout), holding(6, "rank-0.1", six, layout=layout)],
        [holding(6, "rank-1.0", {(1,): "d", (2,): "e"}, layout=layout)],
    ]
    rows[0][1].records.append({"step": 6.0})
    found = choose(rows, [1, 2])
    if len(layout) > 2:  # nobody has the last stage
        assert found is None
        return
    assert found is not None
    assert (found.step, found.records) == (6, [{"step": 6.0}])
    assert found.sources[1,] == [(0, "rank-0.1"), (1, "rank-1.0")]


def test_of_several_layouts_the_newest_step_counts_and_then_the_own() -> None:
    """They were made when there were more workers, or fewer."""
    whole: dict[Part, str] = {(0,): "a", (1,): "b"}
    one, other = (holding(6, f"rank-0.{turn}", whole, layout=(2 + turn,)) for turn in (0, 1))
    for own in (2, 3):
        found = choose([[one, other]], [own])
        assert found is not None
        assert found.layout == (own,)
    newer = choose([[one, other._replace(step=7)]], [2])
    assert newer is not None
    assert newer.layout == (3,)


def test_copies_that_differ_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        [holding(7, "rank-0.0", {(0,): "a", (1,): "b"}), holding(6, "rank-0.1", {(0,): "c", (1,): "d"})],
        [holding(7, "rank-1.0", {(0,): "a", (1,): "x"}), holding(6, "rank-1.1", {(0,): "c", (1,): "d"})],
    ]
    found = choose(rows, [1])
    assert found is not None
    assert found.step == 6
    assert "the copies of stage 1 in memory differ after step 7" in caplog.text


def test_sharded_state_counts_only_where_every_part_is_there(caplog: pytest.LogCaptureFixture) -> None:
    every = {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    newer = {(0,): "a", (1,): "b", (0, 0): "c", (1, 0): "d"}
    older = {(0,): "e", (1,): "f", (0, 0): "g", (1, 0): "h"}
    twin = {(0,): "e", (1,): "f", (0, 1): "i", (1, 1): "j"}
    rows = [
        [holding(7, "rank-0.0", newer, every), holding(6, "rank-0.1", older, every)],
        [holding(6, "rank-1.1", twin, every)],
    ]
    found = choose(rows, [1])
    assert found is not None
    assert found.step == 6
    assert found.sources[1, 1] == [(1, "rank-1.1")]
    assert choose(rows[:1], [1]) is None
    assert "after step 7 are in memory, but optimiser state of stage 0, which only rank 1 had" in caplog.text


def test_copies_of_a_step_are_equal(train: Train, monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    digests: dict[tuple[int, Part], set[str]] = {}
    keep = MemoryCopies.keep

    def kept_(self: MemoryCopies, pipeline: Pipeline, records: Any) -> None:
        keep(self, pipeline, records)
        self.settle()
        for path in kept.glob(f"*/rank-{pipeline.transport.rank}.*"):
            held = memory_copies.holding_of(path)
            assert held is not None
            assert held.layout == self.layout
            for part, digest in held.digests.items():
                digests.setdefault((held.step, part), set()).add(digest)

    monkeypatch.setattr(MemoryCopies, "keep", kept_)
    train("run", train__memory_every=1, train__steps=4)
    assert sorted(digests) == [(step, (stage,)) for step in (1, 2, 3) for stage in (0, 1)]
    assert all(len(found) == 1 for found in digests.values())


def test_no_room_for_copies(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("counterflow.checkpoints.memory_file.MemoryFile.write", full)
    train("run", train__memory_every=1, train__steps=3)
    assert "has no room for copies of weights (No space left on device)" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule__scheme": "pipedream", "train__memory_every": 1}, "pipedream without a flush"),
        ({"pipeline__barrier": False, "train__memory_every": 1}, "chimera without a barrier"),
    ],
)
def test_without_a_whole_update_nothing_is_copied(
    config: Configure, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_memory(config(**changes), 1)


def test_ended_while_it_starts_again_the_copies_stay(
    train: Train, fails: Callable[..., None], kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no checkpoint: what was made until then is in memory alone, and the same command finds it."""
    fails()

    starts: list[None] = []

    def prepare_(*arguments: Any, **options: Any) -> Any:
        starts.append(None)
        if len(starts) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return prepare(*arguments, **options)

    monkeypatch.setattr("counterflow.training.run.prepare", prepare_)
    with pytest.raises(KeyboardInterrupt, match="the metrics of 5 steps are in"):
        train("run", max_restarts=1, train__memory_every=1, **OPTIONS)
    assert STOP.exit_code == 75
    assert list(kept.glob("*/*"))
    summary = train("run", max_restarts=1, train__memory_every=1, train__resume="auto", **OPTIONS)
    assert summary.steps == STEPS
    assert sources(tmp_path / "run") == [(5, "memory")]
    assert [event["event"] for event in read(tmp_path / "run")].count(STOPPED) == 1


def test_on_an_object_store_nothing_is_restarted(
    config: Configure, train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = "36 25 0:31 / / rw - fuse.s3fs s3fs rw"
    monkeypatch.setattr("counterflow.training.run.storage_of", partial(storage_of, mounts=mounts))
    with pytest.raises(ConfigError, match=r"--max-restarts 2: .*run is on fuse\.s3fs, an object store"):
        run(config(), Watcher(), max_restarts=2)
    assert train(train__steps=1).steps == 1
    (warning,) = [line for line in caplog.messages if "fuse.s3fs" in line]
    assert "let one run at a time write there" in warning


def test_locks_of_one_machine_are_told(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = "36 25 0:31 / / rw - lustre 10.0.0.1@tcp:/fs rw,localflock"
    monkeypatch.setattr("counterflow.training.run.storage_of", partial(storage_of, mounts=mounts))
    assert train(train__steps=1, max_restarts=1).steps == 1
    assert "mounted with localflock, so its locks hold on one machine only" in caplog.text


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (2, {}, "give the option to torchrun"),
        (0, {"TORCHELASTIC_MAX_RESTARTS": "2"}, "give its folder as --out"),
    ],
)
def test_under_torchrun(
    config: Configure,
    monkeypatch: pytest.MonkeyPatch,
    given: int,
    environment: dict[str, str],
    message: str,
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        run(config(train__out=None, pipeline__transport="gloo"), Watcher(), max_restarts=given)


def test_a_run_that_failed_twice_does_not_begin_again_under_torchrun(
    config: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(2):
        note(folder, FAILED, step=6, worker=1, message="worker 1: ValueError", lost=False)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"TORCHELASTIC_MAX_RESTARTS": "9"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "attempt", lambda _: 2)
    with pytest.raises(WorkerError, match="step 6 failed twice in the same way"):
        run(config(pipeline__transport="gloo"), Watcher())
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[0])["worker"] == 1


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_run_that_is_finished_ends_well_when_it_is_begun_again(  # noqa: PLR0917
    config: Configure, train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempt: int, kept: Path
) -> None:
    train("run", train__steps=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    more: dict[str, Any] = {"train__steps": 2}
    if attempt:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(world, "attempt", lambda _: attempt)
        more["pipeline__transport"] = "gloo"
    else:
        more["train__resume"] = "auto"
    watcher = Watcher()
    assert run(config(**more), watcher) is None
    assert watcher.events == [f"{tmp_path / 'run'}: all 2 steps were made before"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_worker_says_what_nobody_else_can(
    config: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 is gone, and with it the store: each of the others tells."""

    def lost(*_: Any, **__: Any) -> None:
        error = WorkerError("worker 1, step 5: Forward F1.0: the connection to rank 0 broke")
        error.consequence = True
        raise error

    monkeypatch.setattr("counterflow.training.run.Trainer", lost)
    monkeypatch.setattr(world, "attempt", lambda _: 0)
    monkeypatch.setattr(world, "existing_transport", lambda: None)  # an earlier test's is of one worker
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / METRICS).touch()
    with pytest.raises(WorkerError, match="the connection to rank 0 broke") as caught:
        run(config(pipeline__transport="gloo"), Watcher())
    assert not caught.value.reported
    (event,) = read(tmp_path / "run")
    assert (event["event"], event["step"], event["lost"]) == (FAILED, 1, True)
