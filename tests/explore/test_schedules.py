"""Schedules as the server reports them: the same as the packages that it calls."""

from __future__ import annotations

import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.testclient import TestClient

from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.registry import SCHEMES
from counterflow.simulation import ByteCosts, Costs, simulate
from counterflow.simulation.cost_texts import COSTS

from .conftest import post, refused

DAPPLE: dict[str, Any] = {"scheme": "dapple", "options": {"stages": 2, "micro_batches": 2}}


def moved(*moves: tuple[int, int, int]) -> dict[str, Any]:
    return DAPPLE | {"moves": [{"worker": w, "start": a, "stop": b} for w, a, b in moves]}


def test_every_scheme_comes_with_its_record(client: TestClient) -> None:
    shown = client.get("/api/schemes").json()["schemes"]
    assert [scheme["name"] for scheme in shown] == list(SCHEMES)
    (chimera,) = (scheme for scheme in shown if scheme["name"] == "chimera")
    assert [option["name"] for option in chimera["options"]] == [o.name for o in SCHEMES["chimera"].options]
    assert chimera["depth"] == "stages"


def test_every_cost_comes_with_its_record(client: TestClient) -> None:
    """An address has options and costs side by side, so that no name may be both."""
    costs = {cost["name"]: cost for cost in client.get("/api/schemes").json()["costs"]}
    assert list(costs) == list(COSTS)
    assert not costs.keys() & {option.name for scheme in SCHEMES.values() for option in scheme.options}
    assert (costs["forward"]["usual"], costs["forward"]["group"]) == ("1", "seconds")
    assert (costs["link"]["kind"], costs["link"]["words"][0]) == ("word", ["one-at-a-time"] * 2)
    assert not any("--" in cost["help"] for cost in costs.values())


def test_costs_of_a_stage_are_noted_and_those_of_a_model_are_one_model(client: TestClient) -> None:
    zb_v = {"scheme": "zb-v", "options": {"workers": 2, "micro_batches": 2}}

    def note(*subjects: dict[str, Any]) -> str:
        return str(post(client, "/api/look", {"subjects": list(subjects)})["note"])

    assert note(DAPPLE) == ""
    assert note(zb_v) == "Costs and activations are those of one stage, and zb-v has 4 stages on 2 workers."
    assert note(DAPPLE, zb_v).startswith(
        "These are two models: with one micro-batch, all stages compute 6 F in dapple and 12 F in zb-v."
    )
    half = {"costs": {"forward": "0.5", "backward": "1"}}
    assert "two models" not in note(DAPPLE, zb_v | half)
    share = {"costs": {"costs_of": "worker", "forward": "1", "backward": "2"}}
    total = {"costs": {"costs_of": "model", "forward": "2", "backward": "4"}}
    for costs in (share, total):
        assert note(DAPPLE, zb_v | costs).startswith("Activations are those of one stage")
        rows = post(client, "/api/look", {"subjects": [DAPPLE | costs, zb_v | costs]})["subjects"]
        unit = "F" if costs is share else "s"
        assert [row_["figures"][0][1] for row_ in rows] == [f"9 {unit}", f"7 {unit}"]
        assert [[row["copies"], row["of_share"]] for row in rows[1]["rows"]] == [["1", "1.5"], ["1", "2"]]
    assert "2 numbers are those of one placement's stages" in refused(
        client, "/api/look", {"subjects": [DAPPLE | {"costs": {"costs_of": "worker", "forward": "1,2"}}]}
    )


def test_a_schedule_is_timed_as_the_simulator_times_it(client: TestClient) -> None:
    costs = {"forward": "1,2", "backward": "2.5", "p2p": 0.25, "activation_bytes": "1MiB"}
    shown = post(client, "/api/look", {"subjects": [DAPPLE | {"costs": costs}]})
    result = simulate(
        schemes.dapple(stages=2, micro_batches=2),
        Costs(forward=(1, 2), backward=2.5, p2p=0.25, memory=ByteCosts(activations=2**20)),
    )
    (subject,), (chart,) = shown["subjects"], shown["picture"]["charts"]
    assert subject["makespan"] == chart["makespan"] == result.makespan
    assert chart["end"] == result.end.tolist()
    assert dict(subject["causes"])["message"] > 0
    assert sum(share for _, share in subject["causes"]) == result.bubble_ratio
    assert [row["memory"] for row in subject["rows"]] == ["2 MiB", "1 MiB"]
    assert tuple(chart["slack"]) == result.slack


def test_two_share_an_axis(client: TestClient) -> None:
    gpipe = {"scheme": "gpipe", "options": {"stages": 2, "micro_batches": 4}}
    shown = post(client, "/api/look", {"subjects": [DAPPLE, gpipe]})
    assert shown["picture"]["end"] == 15
    assert [chart["makespan"] for chart in shown["picture"]["charts"]] == [9, 15]


def test_workers_of_one_scheme_are_understood_by_another(client: TestClient) -> None:
    subject = {"scheme": "hanayo", "options": {"stages": 4, "micro_batches": 4, "waves": 1}}
    assert post(client, "/api/look", {"subjects": [subject]})["subjects"][0]["workers"] == 2


def test_a_move_that_is_legal(client: TestClient) -> None:
    """Worker 1 of DAPPLE runs F0 B0 F1 B1; with both forwards first it is GPipe, and right."""
    both = [moved((1, 2, 1))]
    shown = post(client, "/api/look", {"subjects": both})
    assert shown["subjects"][0]["own"] is False
    assert shown["picture"]["charts"][0]["makespan"] == 9
    assert post(client, "/api/check", {"subject": both[0]})["ok"] is True


def test_a_move_that_deadlocks_shows_the_circle(client: TestClient) -> None:
    """Worker 0: B0 F0 F1 B1; worker 1 waits for F0, and B0 for worker 1."""
    shown = post(client, "/api/look", {"subjects": [moved((0, 2, 0))]})
    (subject,), (chart,) = shown["subjects"], shown["picture"]["charts"]
    assert subject["fails"].startswith("deadlock, the workers wait in a circle:")
    circle = [[(chart["worker"][box], chart["start"][box]) for box in pair] for pair in chart["circle"]]
    assert circle == [[(0, 0), (1, 1)], [(1, 0), (0, 2)]]
    report = post(client, "/api/check", {"subject": moved((0, 2, 0))})
    broken = [rule for rule in report["rules"] if rule["ok"] is False]
    assert [rule["rule"] for rule in broken] == [
        "forward before its backward",
        "no deadlock with buffered sends",
    ]
    assert "worker 0, op 0: B0.0 waits for B0.1" in broken[1]["detail"]


def test_moves_that_lead_nowhere(client: TestClient) -> None:
    assert "move 1: worker 2, but there are 2" in refused(
        client, "/api/look", {"subjects": [moved((2, 0, 0))]}
    )
    assert "has 4 ops" in refused(client, "/api/look", {"subjects": [moved((0, 0, 4))]})


def test_limits_are_drawn_and_told(client: TestClient) -> None:
    look = {"subjects": [DAPPLE | {"costs": {"activation_bytes": "1GiB"}}], "memory": "2GiB,512MiB"}
    shown = post(client, "/api/look", look)
    assert [row["over"] for row in shown["subjects"][0]["rows"]] == [False, True]
    assert shown["picture"]["charts"][0]["limit"] == [2 * 2**30, 2**29]
    assert "3 numbers for 2 workers" in refused(client, "/api/look", look | {"memory": "1,2,3"})
    report = post(client, "/api/check", {"subject": DAPPLE, "peak": "1"})
    assert [rule["rule"] for rule in report["rules"] if rule["ok"] is False] == ["peak within the limit"]


def test_a_file_goes_in_and_comes_out(client: TestClient) -> None:
    schedule = schemes.chimera(stages=4, micro_batches=4)
    file = post(client, "/api/file", {"name": "mine.json", "text": dumps(schedule)})
    body = {"subjects": [{"file": file["file"]}]}
    assert post(client, "/api/look", body)["subjects"][0]["heading"] == str(schedule)
    back = client.post("/api/download", json=body | {"form": "schedule"})
    assert loads(back.text, "back") == schedule
    assert back.headers["content-disposition"] == 'attachment; filename="chimera.schedule.json"'
    assert "mine.json: not JSON" in refused(client, "/api/file", {"name": "mine.json", "text": "{"})
    assert "no longer known" in refused(client, "/api/look", {"subjects": [{"file": "0"}]})


def test_downloads(client: TestClient) -> None:
    body = {"subjects": [DAPPLE]}
    rows = list(csv.DictReader(io.StringIO(client.post("/api/download", json=body | {"form": "csv"}).text)))
    assert [row["op"] for row in rows if row["worker"] == "0"] == ["F0.0", "F1.0", "B0.0", "B1.0"]
    assert float(rows[-1]["end"]) == 7
    for form, begin in (("png", b"\x89PNG"), ("html", b"<!doctype html>")):
        answer = client.post("/api/download", json=body | {"form": form})
        assert answer.status_code == 200
        assert answer.content.startswith(begin)
    assert json.loads(client.post("/api/download", json=body | {"form": "trace"}).text)["traceEvents"]


def test_ten_pages_at_once(client: TestClient) -> None:
    """Each gets what it would get alone, though all schedules and models are kept in one place."""

    def answer(number: int) -> Any:
        subject = {"scheme": "chimera", "options": {"stages": 4, "micro_batches": 4 + 2 * (number % 12)}}
        shown = post(client, "/api/look", {"subjects": [subject | {"costs": {"p2p": 0.01 * number}}]})
        return shown["subjects"][0]["makespan"]

    alone = [answer(number) for number in range(60)]
    with ThreadPoolExecutor(10) as pages:
        assert list(pages.map(answer, range(60))) == alone


def test_what_is_too_large_is_refused_before_it_is_built(client: TestClient) -> None:
    for options in ({"stages": 500, "micro_batches": 900}, {"workers": 10**9, "micro_batches": 10**9}):
        said = refused(client, "/api/look", {"subjects": [{"scheme": "dapple", "options": options}]})
        assert "at most 40,000" in said
