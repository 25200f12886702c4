"""Runs as the server reports them: as their folders say, while they are written and after."""

from __future__ import annotations

import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from counterflow.explore.follow import AT_ONCE, FollowedRuns, Pace
from counterflow.explore.requests import RunsRequest
from counterflow.explore.runs import RunState, difference, state_of
from counterflow.explore.web_app import application
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps
from counterflow.simulation import ByteCosts, Costs, Span, simulate
from counterflow.training.supervision import events
from counterflow.training.timeline import Timeline

from .conftest import ASKS, post, refused


def timeline(slower: float = 1.0) -> Timeline:
    """DAPPLE of two workers, the second ``slower`` than predicted."""
    schedule = schemes.dapple(stages=2, micro_batches=2)
    costs = Costs(memory=ByteCosts(activations=100.0))
    ran = simulate(schedule, Costs(forward=(1, slower), backward=(2, 2 * slower), memory=costs.memory))
    spans = tuple(Span(s.worker, s.op, s.start, s.end) for s in ran.timeline)
    return Timeline(schedule, costs, 3, spans, (200, 100))


def run_at(path: Path, steps: int = 3, **files: str) -> Path:
    """A folder as a run writes it."""
    path.mkdir(parents=True)
    lines = [
        {"step": n, "loss": 3.0 / n, "samples_per_second": 8.0, "seconds": 0.1 * n}
        for n in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "schedule.json").write_text(dumps(timeline().schedule))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def server(place: Path) -> TestClient:
    return TestClient(application(places=[place], pace=AT_ONCE), base_url="http://localhost", headers=ASKS)


def look(server: TestClient, *runs: Path, **more: Any) -> Any:
    return post(server, "/api/run", {"runs": [{"name": str(run)} for run in runs], **more})


def test_no_run_yet(server: TestClient, place: Path) -> None:
    assert server.get("/api/runs").json() == {"runs": [], "places": [str(place)]}


def test_a_run_that_goes_on(server: TestClient, place: Path) -> None:
    """The next look has added points; points that the page has are not sent again."""
    run = run_at(place / "one", live__json=timeline().dumps())
    (run / ".lock").write_text(f"process {os.getpid()} on {platform.node()}\n")
    (row,) = server.get("/api/runs").json()["runs"]
    assert (row["name"], row["state"], row["steps"], row["loss"]) == (str(run), "running", 3, "1")
    first = look(server, run)
    assert first["runs"][0]["curves"]["loss"] == [[1, 2, 3], [3, 1.5, 1]]
    assert first["timeline"]["step"] == 3
    seen = {"name": str(run), "metrics": first["runs"][0]["metrics"]}
    second = post(server, "/api/run", {"runs": [seen], "timeline": first["version"]})
    assert second["runs"][0]["curves"] is None
    assert second["timeline"] is None
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.5, "seconds": 0.4}\n{"step": 5, "lo')
    (more,) = post(server, "/api/run", {"runs": [seen]})["runs"]
    assert more["added"] is True
    assert more["curves"]["loss"] == [[4], [0.5]]
    (curve,) = look(server, run)["runs"]
    assert curve["added"] is False
    assert curve["curves"]["loss"] == [[1, 2, 3, 4], [3, 1.5, 1, 0.5]]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.25, "seconds": 0.5}\n')
    assert look(server, run)["runs"][0]["curves"]["loss"][1][-1] == 0.25
    (run / "metrics.jsonl").unlink()  # put back to where it goes on
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "seconds": 0.1}\n')
    assert look(server, run)["runs"][0]["curves"]["loss"] == [[1], [3]]


@pytest.mark.parametrize(
    "had", ["", ".", "a.1.1.1", "{}.1", "{}.-1.0.0", "{}.1.1.1.1", "{}.١.0.0", "{}.x.0.0"]
)
def test_who_has_something_else_gets_the_whole_curve(server: TestClient, place: Path, had: str) -> None:
    run = run_at(place / "one")
    name = look(server, run)["runs"][0]["metrics"].split(".")[0]
    (answer,) = post(server, "/api/run", {"runs": [{"name": str(run), "metrics": had.format(name)}]})["runs"]
    assert (answer["added"], answer["curves"]["loss"]) == (False, [[1, 2, 3], [3, 1.5, 1]])


def test_pages_that_ask_alike_share_an_answer(place: Path) -> None:
    """While it is fresh no file is read for it; the list comes to who has another."""
    run = run_at(place / "one")
    runs = FollowedRuns([place], Pace(fresh_seconds=3600))
    body = json.dumps({"runs": [{"name": str(run)}]}).encode()
    assert runs.cached_answer(body) is None
    first = runs.answer(body, RunsRequest.model_validate_json(body))
    shutil.rmtree(run)
    assert runs.cached_answer(body) == first
    document = json.loads(first)
    assert [row["name"] for row in document["list"]] == [str(run)]
    assert json.loads(runs.listed())["runs"] == document["list"]
    request = RunsRequest.model_validate({"runs": [{"name": str(run)}], "listed": document["listed"]})
    assert json.loads(runs.answer(b"other", request))["list"] is None


def test_timelines_take_no_more_than_their_share(place: Path) -> None:
    """The next one waits, and the page has the one before; then it is there."""
    run = run_at(place / "one", live__json=timeline().dumps())
    wanted = RunsRequest.model_validate({"runs": [{"name": str(run)}]})
    for share, makespans in ((1e-9, [9, 9]), (float("inf"), [9, 15])):
        runs = FollowedRuns([place], Pace(0, share))
        seen = []
        for slower in (1, 2):
            (run / "live.json").write_text(timeline(slower=slower).dumps())
            document = json.loads(runs.answer(b"", wanted))
            seen.append(document["timeline"]["picture"]["charts"][0]["makespan"])
        assert seen == makespans


def test_long_runs_are_thinned_and_keep_their_end(server: TestClient, place: Path) -> None:
    run = run_at(place / "long", steps=5000)
    steps, losses = look(server, run)["runs"][0]["curves"]["loss"]
    assert len(steps) <= 1001
    assert (steps[0], steps[-1], losses[-1]) == (1, 5000, 3.0 / 5000)


def test_where_the_difference_is(server: TestClient, place: Path) -> None:
    """Worker 1 takes twice as long: its ops are slow, and worker 0 waits for it."""
    run = run_at(place / "one", timeline__json=timeline(slower=2).dumps(), summary__json="{}")
    assert state_of(run) == "ended"
    shown = look(server, run)["timeline"]
    assert shown["figures"] == [["measured", "15 s"], ["predicted", "9 s"], ["difference", "6 s"]]
    assert shown["parts"][0] == ["computing", "9 s", "6 s", "3 s"]
    assert [row["slow"] for row in shown["rows"]] == [False, True]
    assert shown["remark"] == ""
    assert [row["saved"] for row in shown["rows"]] == ["200 B", "100 B"]
    assert [chart["makespan"] for chart in shown["picture"]["charts"]] == [15, 9]


def test_a_worker_is_slow_beside_its_prediction_and_not_beside_another() -> None:
    """Both quicker than predicted, one less so: neither is slow; both slower: both are, and it is said."""

    def rows(*times: float) -> Any:
        schedule, costs = timeline().schedule, timeline().costs
        ran = simulate(schedule, Costs(forward=times, backward=tuple(2 * seconds for seconds in times)))
        spans = tuple(Span(s.worker, s.op, s.start, s.end) for s in ran.timeline)
        return difference(Timeline(schedule, costs, 3, spans, (200, 100)))

    quick = rows(0.88, 0.72)
    assert [(row["times"], row["slow"]) for row in quick["rows"]] == [("0.88", False), ("0.72", False)]
    late = rows(1.5, 1.5)
    assert [row["slow"] for row in late["rows"]] == [True, True]
    assert late["remark"].startswith("Every worker is slower than predicted")


def test_what_has_become_of_a_run(server: TestClient, place: Path) -> None:
    """Its state has a name, and why it has no timeline is said by it; a state that changes is told again."""
    lock = f"process 99999999 on {platform.node()}\n"
    ran: dict[RunState, dict[str, Any]] = {
        RunState.RUNNING: {"__lock": f"process {os.getpid()} on {platform.node()}\n"},
        RunState.ENDED: {"summary__json": "{}"},
        RunState.STOPPED: {"summary__json": '{"stopped": true}'},
        RunState.KILLED: {"__lock": lock},
        RunState.FAILED: {},
    }
    for state, files in ran.items():
        run = run_at(place / state, **files)
        if state is RunState.FAILED:
            events.note(run, events.FAILED, attempt=0, step=2, message="no", lost=True, worker=1, action="")
    states = {row["name"]: row["state"] for row in server.get("/api/runs").json()["runs"]}
    assert states == {str(place / state): state.value for state in ran}
    why = {state: look(server, place / state)["timeline"]["problems"][0].partition(": ")[2] for state in ran}
    assert why == {
        RunState.RUNNING: "the first one is written after some steps",
        RunState.ENDED: "it has ended without one",
        RunState.STOPPED: "it was stopped before one was written",
        RunState.KILLED: "it was killed before one was written",
        RunState.FAILED: "it failed before one was written",
    }
    running = place / RunState.RUNNING
    version = look(server, running)["version"]
    (running / ".lock").write_text(lock)
    assert "killed" in look(server, running, timeline=version)["timeline"]["problems"][0]


def window(slower: float = 1.0) -> Timeline:
    """PipeDream of three workers, two steps as they are predicted with the second worker ``slower``."""
    schedule = schemes.pipedream(stages=3)
    costs = Costs(memory=ByteCosts(activations=100.0))
    ran = Costs(forward=(1, slower, 1), backward=(2, 2 * slower, 2), memory=costs.memory)
    predicted = Timeline(schedule, ran, 9, (), (), ongoing=True)
    spans = tuple(span for row in predicted.predicted_rows() for span in row)
    return Timeline(schedule, costs, 9, spans, (300, 200, 100), ongoing=True)


def test_without_a_flush_two_steps_that_follow_each_other(server: TestClient, place: Path) -> None:
    """A forward takes 1 and a backward 2, so that a step takes 3; twice that where the second worker does."""
    shown = window(slower=2)
    run = run_at(place / "one", live__json=shown.dumps(), schedule__json=dumps(shown.schedule))
    timeline_shown = look(server, run)["timeline"]
    assert timeline_shown["problems"] == []
    assert timeline_shown["figures"] == [["measured", "6 s"], ["predicted", "3 s"], ["difference", "3 s"]]
    assert timeline_shown["parts"] == [
        ["computing", "4 s", "3 s", "1 s"],
        ["waiting for others' ops and messages", "2 s", "0 s", "2 s"],
    ]
    assert [row["slow"] for row in timeline_shown["rows"]] == [False, True, False]
    charts = timeline_shown["picture"]["charts"]
    assert [len(chart["start"]) for chart in charts] == [12, 12]
    assert charts[0]["heading"].startswith("measured, steps 8 and 9: pipedream")
    document = json.loads(shown.dumps())
    document["measured"].pop()
    (run / "live.json").write_text(json.dumps(document))
    (problem,) = look(server, run)["timeline"]["problems"]
    assert "worker 2: its 3 ops are not 2 steps of the schedule" in problem


def test_the_parts_add_up_to_the_difference() -> None:
    shown = timeline(slower=1.7)
    parts = difference(shown)["parts"]
    sums = [sum(float(part[i].split()[0]) for part in parts) for i in (1, 2, 3)]
    measured, predicted = shown.measured().makespan, shown.predicted().makespan
    assert sums == pytest.approx([measured, predicted, measured - predicted], rel=1e-3)


def test_events_and_checkpoints(server: TestClient, place: Path) -> None:
    run = run_at(place / "one")
    events.note(
        run, events.FAILED, attempt=0, step=2, message="worker 1 died", lost=True, worker=1, action=""
    )
    events.note(run, events.RESTARTED, attempt=1, step=1, source="memory")
    (run / "checkpoint" / "step-2").mkdir(parents=True)
    (run / "checkpoint" / "step-2" / "checkpoint.json").touch()
    assert state_of(run) == "stopped"
    (shown,) = look(server, run)["runs"]
    assert [(event["text"], event["kind"]) for event in shown["events"]] == [
        ("step 2 failed: worker 1 died", "wrong"),
        ("restart 1: resuming after step 1, from the workers' memory", ""),
        ("checkpoint step-2", "kept"),
    ]


def test_several_runs_side_by_side(server: TestClient, place: Path) -> None:
    runs = [run_at(place / name, timeline__json=timeline(n).dumps()) for n, name in ((1, "a"), (2, "b"))]
    shown = look(server, *runs)
    charts = shown["timeline"]["picture"]["charts"]
    assert [chart["heading"].split(":")[0] for chart in charts] == [str(run) for run in runs]
    assert [chart["makespan"] for chart in charts] == [9, 15]


DAMAGED = (
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0" * 100, b"[" * 100_000, b"1" * 10_000, b"\n" * 1000),
    *(b'{"format": "counterflow-timeline"}\n', b'{"format": "counterflow-schedule", "orders": [[1e999]]}\n'),
    *(b'{"step": 4, "loss": NaN, "seconds": 1}\n', b'{"step": 1e308, "loss": -Infinity, "seconds": 1}\n'),
    b'{"step": 4, "loss": 1%s, "seconds": 1}\n' % (b"0" * 400),
    *(b'{"event": "failed"}\n', b'{"event": "stopped", "time": [], "step": {}, "signal": null}\n'),
)


def test_whatever_a_runs_files_hold_there_is_an_answer(server: TestClient, place: Path) -> None:
    """Another program, a full disk or a user wrote them; the other run beside it is there as it was."""
    names = ("metrics.jsonl", "schedule.json", "live.json", "timeline.json", "config.toml")
    good = run_at(place / "good", timeline__json=timeline().dumps())
    for name in (*names, "events.jsonl", "summary.json", ".lock"):
        run = run_at(place / f"bad-{name}", live__json=timeline().dumps())
        for text in DAMAGED:
            (run / name).write_bytes(text)
            rows = server.get("/api/runs").json()["runs"]
            assert [row["loss"] for row in rows if row["name"] == str(good)] == ["1"]
            shown = look(server, run, good)
            assert shown["runs"][1]["curves"]["loss"] == [[1, 2, 3], [3, 1.5, 1]]


def test_a_run_that_is_removed_while_it_is_watched(server: TestClient, place: Path) -> None:
    """A request for it is refused; the list has the others; a new one of its name is another run."""
    run, second_run = run_at(place / "one"), run_at(place / "two")
    seen = {"name": str(run), "metrics": look(server, run, second_run)["runs"][0]["metrics"]}
    shutil.rmtree(run)
    assert [row["name"] for row in server.get("/api/runs").json()["runs"]] == [str(second_run)]
    assert "is not among those" in refused(server, "/api/run", {"runs": [seen]})
    run_at(run, steps=2)
    shown = post(server, "/api/run", {"runs": [seen]})["runs"][0]
    assert shown["curves"]["loss"] == [[1, 2], [3, 1.5]]
    shutil.rmtree(place)
    assert server.get("/api/runs").json()["runs"] == []


def test_what_is_damaged_is_told(server: TestClient, place: Path, tmp_path: Path) -> None:
    run = run_at(place / "one", timeline__json="{", config__toml="=", events__jsonl="[1]\nx\n{}\n")
    (run / ".lock").write_text("process 99999999999999999999 on " + platform.node() + "\n")
    shown = look(server, run)
    assert "timeline.json: not the timeline of a run, or damaged" in shown["timeline"]["problems"][0]
    assert "problem" in shown["runs"][0]["about"]
    outside = run_at(tmp_path / "other")
    assert "is not among those" in refused(server, "/api/run", {"runs": [{"name": str(outside)}]})
