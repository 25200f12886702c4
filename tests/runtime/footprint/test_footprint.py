"""The record of a pipeline's memory and its text."""

from __future__ import annotations

import json

from counterflow.runtime.footprint.footprint import Memory, WorkerMemory

MIB = 2**20
WORKER = WorkerMemory(0, 2 * MIB, 2 * MIB, 4 * MIB, 3 * 2**30, 1000, 0)


def memory(available_bytes: int | None) -> Memory:
    workers = (WORKER, *(WorkerMemory(n, MIB, MIB, MIB, MIB, 0, 512) for n in range(1, 4)))
    return Memory("1f1b(stages=4)", workers, available_bytes, ("not counted: this",))


def test_the_table_has_equal_workers_in_one_line() -> None:
    assert str(memory(2**30)).splitlines() == [
        "memory of 1f1b(stages=4)",
        "worker    weights gradients optimizer activations  messages workspace     total",
        "0           2 MiB     2 MiB     4 MiB       3 GiB    1000 B       0 B  3.01 GiB",
        "1–3         1 MiB     1 MiB     1 MiB       1 MiB       0 B     512 B     4 MiB",
        "1 GiB available to a worker: does not fit",
        "not counted: this",
    ]
    assert all(len(line) <= 80 for line in str(memory(None)).splitlines())


def test_fields_are_those_of_json() -> None:
    record = json.loads(json.dumps(memory(4 * 2**30).as_dict()))
    assert record["fits"] is True
    assert record["workers"][0]["total"] == record["peak_bytes"] == WORKER.total
    assert memory(None).fits is None
