"""The trace follows the rules of the Trace Event Format that Perfetto holds files to."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from counterflow.drawing import draw
from counterflow.schedule import schemes
from counterflow.schedule.ir import OptionValue
from counterflow.schedule.registry import build
from counterflow.simulation import ByteCosts, Costs, Simulation, simulate


def simulated(name: str, costs: Costs | None = None, **options: OptionValue) -> Simulation:
    return simulate(build(name, options), costs)


def events(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    trace_events: list[dict[str, Any]] = trace["traceEvents"]
    return trace_events


def test_one_complete_event_an_op(tmp_path: Path) -> None:
    costs = Costs(forward=1 / 3, backward=0.7, sync=0.1)
    result = simulated("chimera", costs, stages=4, micro_batches=8)
    draw(result, tmp_path / "x.trace.json")
    complete = [event for event in events(tmp_path / "x.trace.json") if event["ph"] == "X"]
    assert len(complete) == len(result.timeline) + len(result.syncs)
    threads = defaultdict(list)
    for event in complete:
        threads[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    assert len(threads) == 8
    for spans in threads.values():
        now = 0
        for start, lasts in spans:
            assert start >= now
            now = start + lasts


def test_the_first_op(tmp_path: Path) -> None:
    draw(simulated("chimera", stages=4, micro_batches=4), tmp_path / "x.trace.json")
    first = next(event for event in events(tmp_path / "x.trace.json") if event["ph"] == "X")
    assert first == {
        "ph": "X",
        "name": "F0 down pipe",
        "cat": "forward",
        "pid": 1,
        "tid": 1,
        "ts": 0.0,
        "dur": 1e6,
        "args": {
            "what": "forward of micro-batch 0",
            "stage": 0,
            "pipe": 0,
            "lane": "down pipe",
            "micro-batches": "0",
            "op": "F0.0",
        },
    }


def test_every_kind_has_its_letter(tmp_path: Path) -> None:
    draw(simulate(schemes.dualpipe_v(workers=2, micro_batches=4)), tmp_path / "x.trace.json")
    complete = [event for event in events(tmp_path / "x.trace.json") if event["ph"] == "X"]
    assert {(event["name"][0], event["cat"]) for event in complete} == {
        ("F", "forward"),
        ("B", "backward"),
        ("I", "input gradient"),
        ("W", "weight gradients"),
    }


def test_names_and_counters(tmp_path: Path) -> None:
    costs = Costs(memory=ByteCosts(weights=10, activations=100))
    result = simulated("dapple", costs, stages=2, micro_batches=2)
    gems = simulated("gems", costs, stages=2, micro_batches=2)
    draw(result, tmp_path / "x.trace.json", compare=gems, memory=True)
    trace_events = events(tmp_path / "x.trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in trace_events if e["name"] == "process_name"}
    assert processes[1].startswith("1F1B (dapple)  D=2, N=2 — makespan 9 F")
    assert processes[2].startswith("gems  D=2, N=2 — makespan 11 F")
    labels = [e["args"]["labels"] for e in trace_events if e["name"] == "process_labels"]
    assert labels[0] == "bubbles 33.3 %: warm-up 5.56 %, dependency 16.7 %, drain 11.1 %"
    threads = [e["args"]["name"] for e in trace_events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["worker 0", "worker 1"]
    counters = [
        e for e in trace_events if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "worker 0 memory"
    ]
    assert max(e["args"]["bytes"] for e in counters) == 220
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
