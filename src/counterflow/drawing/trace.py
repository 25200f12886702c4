"""A trace for Perfetto (ui.perfetto.dev) and Chrome's tracer: one process per chart, one thread per worker.

Gradient syncs have a thread of their own below their worker's, memory is a counter per worker. Starts and
ends are rounded to nanoseconds in the same way, so adjacent ops never overlap by a rounding error. Invariant:
one complete event ("X") per box.

Source: "Trace Event Format" (the JSON of chrome://tracing).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .chart import LETTERS, Arrow, Box, BoxKind, Chart, Memory

Event = Mapping[str, object]

_SHORT = LETTERS | {BoxKind.SYNC: "sync of stage "}


def write_trace(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts as one trace."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for event in trace_events(charts):
            file.write("" if first else ",\n")
            file.write(json.dumps(event, separators=(",", ":")))
            first = False
        file.write("\n]}\n")


def trace_events(charts: Sequence[Chart]) -> Iterator[Event]:
    """The events of all charts; ``pid`` is the chart, from 1."""
    for process, chart in enumerate(charts, start=1):
        yield from _names(process, chart)
        for box in sorted(chart.boxes, key=lambda b: (b.start, b.worker, b.end)):
            yield _complete(process, chart, box)
        yield from _messages(process, chart)
        if chart.memory is not None:
            yield from _counters(process, chart, chart.memory)


def _meta(process: int, what: str, thread: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _slice(name: str, kind: str, where: tuple[int, int], box: Box | Arrow, args: Event) -> Event:
    start, end = _nanoseconds(box.start), _nanoseconds(box.end)
    place = {"pid": where[0], "tid": where[1], "ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": kind, **place, "args": args}


def _messages(process: int, chart: Chart) -> Iterator[Event]:
    links = sorted({(m.sender, m.receiver) for m in chart.messages})
    threads = {link: 2 * chart.workers + 1 + i for i, link in enumerate(links)}
    for (sender, receiver), thread in threads.items():
        yield _meta(process, "thread_name", thread, name=f"worker {sender} → worker {receiver}")
    for m in chart.messages:
        yield _slice(m.what, "message", (process, threads[m.sender, m.receiver]), m, {})


def _thread(worker: int, *, sync: bool) -> int:
    return 2 * worker + 1 + sync


def _names(process: int, chart: Chart) -> Iterator[Event]:
    yield _meta(process, "process_name", 0, name=chart.title)
    yield _meta(process, "process_labels", 0, labels=chart.split)
    yield _meta(process, "process_sort_index", 0, sort_index=process)
    for worker in range(chart.workers):
        for sync in (False, True) if chart.has_syncs else (False,):
            thread = _thread(worker, sync=sync)
            yield _meta(
                process, "thread_name", thread, name=f"worker {worker} syncs" if sync else f"worker {worker}"
            )
            yield _meta(process, "thread_sort_index", thread, sort_index=thread)


def _complete(process: int, chart: Chart, box: Box) -> Event:
    lane = chart.lanes[box.lane].name if box.lane is not None else ""
    known = {
        "pipe": box.pipe,
        "lane": lane,
        "micro-batches": ", ".join(map(str, box.micro_batches)),
        "op": box.op,
        "needs": "; ".join(chart.boxes[i].placed for i in box.needs),
        "detail": box.detail,
    }
    args = {"what": box.what, "stage": box.stage} | {k: v for k, v in known.items() if v not in (None, "")}
    # Perfetto colours by the name without its numbers: by direction and lane.
    name = f"{_SHORT[box.kind]}{box.label}" + (f" {lane}" if lane else "")
    where = process, _thread(box.worker, sync=box.kind is BoxKind.SYNC)
    return _slice(name, box.kind.value, where, box, args)


def _counters(process: int, chart: Chart, memory: Memory) -> Iterator[Event]:
    for worker, use in enumerate(memory.workers):
        changes = [*zip(use.times, use.amounts, strict=True), (chart.makespan, use.amounts[-1])]
        for time, amount in changes:
            yield {
                "ph": "C",
                "name": f"worker {worker} memory",
                "pid": process,
                "tid": 0,
                "ts": _nanoseconds(time) / 1000,
                "args": {memory.unit.value: amount},
            }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
