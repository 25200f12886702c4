"""Searches in processes of their own: told, stopped, refused; and what they find."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from counterflow.errors import ConfigError
from counterflow.explore.best_orders import command_of, order, workload_of
from counterflow.explore.jobs import Jobs
from counterflow.explore.plan_answers import changed, known, plan, task_of
from counterflow.explore.requests import (
    OrderRequest,
    PlanRequest,
    RequestCosts,
    ScheduleReference,
    SearchInput,
)
from counterflow.planning.inputs import input_files
from counterflow.planning.task import load_example
from counterflow.schedule import schemes
from counterflow.schedule.formats import dumps, loads

from .conftest import post, refused

DAPPLE: dict[str, Any] = {"scheme": "dapple", "options": {"stages": 2, "micro_batches": 4}}


def ended(client: TestClient, job: dict[str, str], stop: bool = False) -> Any:
    """Wait for the end of a search and return its report; two minutes are much more than it takes."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        report = post(client, "/api/job", job | {"stop": stop})
        if report["state"] != "running":
            return report
        time.sleep(0.05)
    raise AssertionError("the search did not end")


def test_an_order_is_computed_in_a_process(client: TestClient) -> None:
    """Four split micro-batches on two stages: ZB-H1's order, proved at once, is no longer than 1F1B's."""
    job = post(client, "/api/order", {"subject": DAPPLE, "split": True, "seconds": 5, "peak": "2"})
    report = ended(client, job)
    assert report["state"] == "done", report
    computed = loads(report["result"]["schedule"], "computed")
    assert computed.workload == workload_of(schemes.dapple(stages=2, micro_batches=4), split=True)
    facts = dict(report["result"]["facts"])
    assert facts["gap"] == "none: no order is better"
    assert facts["makespan"] == facts["lower bound"]
    said, makespan = report["result"]["said"], facts["makespan"]
    assert said.startswith(f"Computed order: {makespan}, and no order is better; the best named scheme, zb-")
    words = "--placement 0,1 --micro-batches 4 --peak 2 --seconds 5 --out order.json"
    assert report["result"]["command"] == f"counterflow synthesize {words}"


def test_a_command_computes_the_same_workload() -> None:
    costs = RequestCosts.model_validate({"forward": "1,2", "backward": "3"})
    for schedule, words in (
        (schemes.chimera(stages=2, micro_batches=4), "--placement 0,1/1,0 --micro-batches 4 --no-split"),
        (schemes.zb_v(workers=2, micro_batches=3), "--placement 0,1,1,0 --micro-batches 3"),
    ):
        reference = ScheduleReference(scheme=schedule.scheme, costs=costs)
        request = OrderRequest(subject=reference, objective="steady", seconds=0.5)
        expected = f"{words} --forward 1,2 --backward 3 --objective steady --seconds 0.5 --out order.json"
        assert command_of(request, schedule.workload) == f"counterflow synthesize {expected}"
    doubled = schemes.chimera(stages=2, micro_batches=4, concat="forward-doubling").workload
    assert command_of(OrderRequest(subject=ScheduleReference(scheme="chimera")), doubled) is None


def test_a_search_imports_nothing_from_the_current_folder(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    free = {"subject": {"scheme": "pipedream", "options": {"stages": 2}}}
    assert "asynchronous" in ended(client, post(client, "/api/order", free))["error"]


def test_one_that_fails_says_why_and_one_that_is_stopped_ends(client: TestClient) -> None:
    free = {"subject": {"scheme": "pipedream", "options": {"stages": 2}}}
    failed = ended(client, post(client, "/api/order", free))
    assert failed["state"] == "failed"
    assert "asynchronous" in failed["error"]
    job = post(client, "/api/plan", {"example": "mixpipe-bert48"})
    assert ended(client, job, stop=True)["state"] == "stopped"


def test_one_that_is_stopped_while_it_begins_says_nothing(
    client: TestClient, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is it the answer to who asks for the same again."""
    wanted = {"example": "mixpipe-bert48"}
    begun = set()
    for seconds in (0.1, 0.15, 0.2, 0.3):
        job = post(client, "/api/plan", wanted)
        time.sleep(seconds)
        assert ended(client, job, stop=True)["state"] == "stopped"
        begun.add(job["job"])
    assert len(begun) == 4
    assert capfd.readouterr().err == ""


def test_no_more_than_two_at_a_time() -> None:
    jobs = Jobs()
    work = SearchInput(plan=PlanRequest(example="chimera-bert48"))
    try:
        names = [jobs.start(work)["job"] for _ in range(2)]
        with pytest.raises(ConfigError, match="2 searches are running already"):
            jobs.start(work)
        assert [jobs.find(name).state for name in names] == ["running", "running"]
    finally:
        jobs.end()


def test_what_is_wrong_is_told_at_once(client: TestClient) -> None:
    wrong = {"subject": DAPPLE | {"costs": {"forward": "x"}}}
    assert "forward=x" in refused(client, "/api/order", wrong)
    assert "unknown example" in refused(client, "/api/plan", {"example": "nothing"})
    assert "also give model, profile, cluster, mini_batch" in refused(client, "/api/plan", {})
    damaged = {"example": "chimera-bert48", "cluster": {"name": "mine.toml", "text": "name = 3"}}
    assert refused(client, "/api/plan", damaged).startswith("mine.toml: ")
    assert "is not known" in refused(client, "/api/job", {"job": "x"})


def test_the_order_is_told_in_the_words_of_the_commands() -> None:
    reports: list[dict[str, Any]] = []
    schedule = schemes.dapple(stages=2, micro_batches=2)
    wanted = OrderRequest(subject=ScheduleReference(scheme="dapple"), seconds=0.0)
    result = order(wanted, dumps(schedule), reports.append)
    assert dict(result["facts"])["makespan"] == "9 F"
    assert loads(result["schedule"], "x").workload == schedule.workload
    assert reports[-1]["best"] == "9 F"


def test_a_plan_is_that_of_the_planner(client: TestClient) -> None:
    """Each scheme's best, with what limits it; a device with little memory leaves fewer."""
    small = load_example("hanayo-bert64")
    text = input_files.dumps(small.model)
    request = PlanRequest.model_validate(
        {"example": "hanayo-bert64", "model": {"name": "m.toml", "text": text}, "mini_batch": 2}
    )
    assert task_of(request).model == small.model
    seen: list[dict[str, Any]] = []
    result, saved_plans = plan(request, seen.append)
    best = result["plans"][0]
    assert [scheme for scheme, *_ in result["rejected"]].count(best["scheme"]) == 1
    assert (
        sum(share for _, share, _ in best["parts"]) == 1
        or abs(sum(s for _, s, _ in best["parts"]) - 1) < 1e-6
    )
    assert best["picture"]["charts"][0]["workers"] == best["workers"]
    done = [report for report in seen if "done" in report]
    assert done[-1]["done"] == done[-1]["of"]
    assert [report["share"] for report in seen if report.get("done") == report.get("of")] == [None] * (
        len(seen) - sum(report.get("done") != report.get("of") for report in seen)
    )
    assert [plan_.prediction.schedule for plan_ in saved_plans.plans] == [
        plan_["schedule"] for plan_ in result["plans"]
    ]


def test_a_comparison_has_each_scheme_and_opens_with_its_costs(client: TestClient) -> None:
    costs = {"forward": "3", "weight_bytes": "1GiB"}
    asks = {"workers": 2, "micro_batches": 4, "costs": costs, "seconds": 2}
    report = ended(client, post(client, "/api/compare", asks))
    assert report["state"] == "done", report
    rows = {row["name"]: row for row in report["result"]["rows"]}
    assert rows["zb-v"]["scheme"] == "zb-v"
    zb_v = {
        "scheme": "zb-v",
        "options": rows["zb-v"]["options"],
        "costs": costs | {"costs_of": "worker"},
    }
    (opened,) = post(client, "/api/look", {"subjects": [zb_v]})["subjects"]
    assert dict(opened["figures"])["makespan"] == rows["zb-v"]["step"]
    assert rows["zb-v"]["memory"] == "2 GiB"
    computed = rows["computed in a V"]
    assert loads(computed["schedule"], "computed").stages == 4
    lengths = [row["length"] for row in report["result"]["rows"]]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 1
    assert "forward=x: cannot read 'x'" in refused(client, "/api/compare", asks | {"costs": {"forward": "x"}})
    assert "memory: 2 numbers" in refused(client, "/api/compare", asks | {"memory": "1GiB,2GiB"})
    assert "workers" in refused(client, "/api/compare", asks | {"workers": 0})


def test_a_plan_opens_with_its_costs_and_is_saved(client: TestClient) -> None:
    """To the last digit; who asks for the same plan again has it at once."""
    asks = {"example": "hanayo-bert64", "mini_batch": 2}
    job = post(client, "/api/plan", asks)
    result = ended(client, job)["result"]
    assert post(client, "/api/plan", asks) == job
    for number in (0, len(result["plans"]) - 1):
        opened = post(client, "/api/plan/open", job | {"plan": number})
        look = post(client, "/api/look", {"subjects": [{"file": opened["file"]}]})
        (chart,), (planned,) = look["picture"]["charts"], result["plans"][number]["picture"]["charts"]
        assert all(chart[name] == planned[name] for name in ("heading", "start", "end", "memory", "bubbles"))
        assert look["note"] == ""
    saved = client.post("/api/plan/save", json=job | {"plan": 0})
    assert saved.headers["content-disposition"] == 'attachment; filename="plan.toml"'
    config = tomllib.loads(saved.text)
    assert config["schedule"]["scheme"] == result["plans"][0]["scheme"]
    for path in ("/api/plan/open", "/api/plan/save"):
        assert "has found fewer" in refused(client, path, job | {"plan": 99})
        assert "is not known" in refused(client, path, {"job": "x", "plan": 0})
    dear = {"subjects": [{"file": opened["file"], "costs": {}}]}
    assert post(client, "/api/look", dear)["subjects"][0]["makespan"] != look["subjects"][0]["makespan"]


def test_an_order_for_a_plan_is_computed_with_its_costs(client: TestClient) -> None:
    """The computed order keeps them, and is no slower."""
    job = post(client, "/api/plan", {"example": "hanayo-bert64", "mini_batch": 2})
    schemes_ = [plan["scheme"] for plan in ended(client, job)["result"]["plans"]]
    opened = post(client, "/api/plan/open", job | {"plan": schemes_.index("zb-h1")})
    order_ = ended(client, post(client, "/api/order", {"subject": {"file": opened["file"]}, "seconds": 1}))
    file = {"name": "computed", "text": order_["result"]["schedule"], "like": opened["file"]}
    computed = post(client, "/api/file", file)
    both = [{"file": opened["file"]}, {"file": computed["file"]}]
    planned_makespan, computed_makespan = (
        row["makespan"] for row in post(client, "/api/look", {"subjects": both})["subjects"]
    )
    assert computed_makespan <= planned_makespan < 100  # seconds, by the plan's costs


def test_other_links_and_memory() -> None:
    cluster = load_example("mixpipe-bert48").cluster
    larger = changed(cluster, link_speed=4.0, memory=2.0)
    assert larger.between.seconds(1e6) == cluster.between.seconds(1e6) / 4
    assert larger.inside.seconds(1e6) == cluster.inside.seconds(1e6) / 4
    assert larger.memory_bytes == 2 * cluster.memory_bytes
    assert changed(cluster, link_speed=1.0, memory=1.0) == cluster
    assert larger.name == f"{cluster.name}, links x4, memory x2"
    assert {"mixpipe-bert48", "chimera-bert48"} <= {record["name"] for record in known()}
