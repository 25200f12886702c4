"""torch's CSV of schedules: what torch writes is read, and what is written torch reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from counterflow.errors import ConfigError
from counterflow.program.checker import inspect
from counterflow.schedule import schemes
from counterflow.schedule.formats import loads
from counterflow.schedule.ir import Schedule, SkipLink
from counterflow.schedule.torch_csv import dumps

RANKS = 4


class Stage(_PipelineStageBase):
    """As much of a stage as an order of its ops needs."""

    def __init__(self, index: int, stages: int) -> None:
        self.submod = None  # type: ignore[assignment]
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank, self.group = RANKS, 0, None
        self.device = torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = _nothing


def made(kind: Any, chunks: int, micro_batches: int) -> Any:
    """One of torch's schedules."""
    stages = [Stage(index, RANKS * chunks) for index in range(chunks)]
    return kind(stages, micro_batches, loss_fn=lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "chunks", "micro_batches"),
    [
        (theirs.ScheduleLoopedBFS, 2, 8),
        (theirs.ScheduleInterleaved1F1B, 1, 8),
        (theirs.ScheduleInterleaved1F1B, 2, 8),
        (theirs.ScheduleInterleavedZeroBubble, 2, 8),
        (theirs.ScheduleZBVZeroBubble, 2, 8),
        (theirs.ScheduleDualPipeV, 2, 8),
    ],
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_writes_is_read(
    kind: Any, chunks: int, micro_batches: int, form: Any, tmp_path: Path
) -> None:
    schedule = made(kind, chunks, micro_batches)
    schedule._dump_csv(tmp_path / "torch.csv", form)
    found = loads((tmp_path / "torch.csv").read_text(), "torch.csv")
    report = inspect(found)
    assert report.ok, report
    assert (found.workers, found.stages) == (RANKS, RANKS * chunks)
    assert found.micro_batches == micro_batches
    for rank, order in schedule.pipeline_order.items():
        actions = [one for action in order if action is not None for one in action.sub_actions or [action]]
        ours = [f"{op.stage}{op.kind.value}{op.micro_batches[0]}" for op in found.orders[rank]]
        assert ours == [str(action) for action in actions]


def test_torchs_1f1b_is_read_and_its_slip_is_found() -> None:
    """Its plain 1F1B runs by other code; torch 2.13 numbers the forwards of the last rank from 1 in it."""
    order = theirs.Schedule1F1B(Stage(0, RANKS), 8, loss_fn=lambda *_: None)._get_pipeline_order()
    assert order is not None
    rows = [",".join(str(action or "") for action in order[rank]) for rank in range(RANKS)]
    found = loads("\n".join(rows), "1f1b.csv")
    assert found.orders[:-1] == schemes.dapple(RANKS, 8).orders[:-1]
    broken = [result.detail for result in inspect(found).results if result.ok is False]
    assert "F0.3 is in no order" in broken[0]
    rows[-1] = re.sub(r"F(\d)", lambda forward: f"F{int(forward[1]) - 1}", rows[-1])
    mended = loads("\n".join(rows), "1f1b.csv")
    assert inspect(mended).ok
    assert mended.orders == schemes.dapple(RANKS, 8).orders


SAID = [
    schemes.dapple(RANKS, 8),
    schemes.gpipe(RANKS, 8),
    schemes.interleaved(RANKS, 8, chunks=2),
    schemes.hanayo(RANKS, 8, waves=1),
    schemes.zb_h1(RANKS, 8),
    schemes.zb_v(RANKS, 8),
    schemes.dualpipe_v(RANKS, 8),
    schemes.interleaved_zb(RANKS, 8, chunks=2),
]


@pytest.mark.parametrize("schedule", SAID, ids=str)
def test_torch_reads_what_is_written(schedule: Schedule, tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    path.write_text(dumps(schedule))
    stages = [Stage(index, schedule.stages) for index in range(schedule.stages // RANKS)]
    runtime: Any = theirs._PipelineScheduleRuntime(stages, 8, loss_fn=lambda *_: None)
    runtime._load_csv(path)
    holders = schedule.placement.pipes_stages[0]
    assert runtime.stage_index_to_group_rank == dict(enumerate(holders))
    compute = {
        rank: [
            one for one in order if one.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        ]
        for rank, order in runtime.pipeline_order_with_comms.items()
    }
    theirs._simulate_comms_compute(compute, holders.__getitem__, schedule.stages)  # no rank waits for ever
    read = loads(dumps(schedule), "ours.csv")
    assert read.orders == schedule.orders
    assert read.placement == schedule.placement
    assert inspect(read).ok
    assert dumps(read) == dumps(schedule)


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (schemes.chimera(2, 2), "2 pipes with copies of the stages"),
        (schemes.dualpipe(4, 8), "2 pipes with copies of the stages"),
        (schemes.pipedream(2), "no flush and several versions of the weights"),
        (schemes.pipedream_2bw(2, 2), "no flush and several versions of the weights"),
        (schemes.dapple(3, 2).with_skips([SkipLink(0, 2)]), "skip connections"),
    ],
    ids=str,
)
def test_what_it_cannot_say_is_refused_by_name(schedule: Schedule, fault: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{schedule.scheme}.* has {fault}, which torch's CSV cannot express"
    ):
        dumps(schedule)


def test_sliced_orders_are_read_back_here_and_refused_by_torch(tmp_path: Path) -> None:
    """In torch they would be other orders, of whole micro-batches."""
    schedule = schemes.dapple(stages=2, micro_batches=2, slices=2)
    text = dumps(schedule)
    assert text == (
        "0/2:0F0,1/2:0F0,0/2:0F1,1/2:0B0,1/2:0F1,0/2:0B0,1/2:0B1,0/2:0B1\n"
        "0/2:1F0,1/2:1F0,1/2:1B0,0/2:1F1,0/2:1B0,1/2:1F1,1/2:1B1,0/2:1B1\n"
    )
    for sliced in (schedule, schemes.zb_v(workers=2, micro_batches=1, slices=3)):
        found = loads(dumps(sliced), "x.csv")
        assert (found.workload, found.orders) == (sliced.workload, sliced.orders)
        assert inspect(found).ok
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(RuntimeError, match="Invalid action string: 0/2:0F0"):
        theirs._Action.from_str("0/2:0F0")
    runtime: Any = theirs._PipelineScheduleRuntime([Stage(0, RANKS)], 2, loss_fn=lambda *_: None)
    with pytest.raises(RuntimeError, match="Invalid action string: 0/2:0F0"):
        runtime._load_csv(tmp_path / "x.csv")


GROUPED = '{"format": "counterflow-schedule", "format_version": 1, "scheme": "own", "options": {}, '


@pytest.mark.parametrize(
    ("orders", "fault"),
    [
        ('[["F(0,1).0", "B0.0", "B1.0"]]', "micro-batches that run together"),
        ('[["F0.0", "F1.0", "B0.0:0/2", "B0.0:1/2", "B1.0"]]', "micro-batches that are halved"),
    ],
)
def test_ops_that_it_cannot_say_are_refused_by_name(orders: str, fault: str) -> None:
    schedule = loads(GROUPED + f'"micro_batches": 2, "placement": [[0]], "orders": {orders}}}', "own.json")
    with pytest.raises(ConfigError, match=f"has {fault}, which torch's CSV cannot express"):
        dumps(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv: no forward of any stage; expected one row per rank"),
        ("0F0,0X0", r"x.csv: row 0, cell 1: '0X0' is not an action; actions look like 2F0"),
        ("0F0\n1F0x", r"x.csv: row 1, cell 0: '1F0x' is not an action"),
        ("0F0,0B0\n0F1", "x.csv: stage 0 is on row 0 and on row 1; each stage must be on one rank"),
        ("0F0\n2F0", "x.csv: no op of stage 1, but one of stage 2"),
        ("0F0,0F2", "x.csv: no op of micro-batch 1, but one of micro-batch 2"),
        ("0F1111111111", "is not an action"),
        ("2/2:0F0", "'2/2:0F0' is not an action"),
        ("0/999999999:0F0", "1 micro-batches in 999999999 slices, but 1 forwards in total"),
        ("0/0:0F0", "'0/0:0F0' is not an action"),
        ("0/2:0F0,1/2:0F0,0B0", "x.csv: ops of micro-batches in 1 and in 2 slices; all are cut alike"),
        ("(0F0;0B0)OVERLAP", "is not an action"),
        ("0F0,0UNSHARD3", "row 0, cell 1: '0UNSHARD3' is not an action"),
        ("0F0,0SEND_F", "'0SEND_F' is not an action"),
        ("0F0,0/2:0SEND_F0", "'0/2:0SEND_F0' is not an action"),
        ("0F0,(0F1;0B0)BATCH_P2P", "row 0, cell 1: 0F1 is no send or receive, and in a BATCH_P2P"),
        ('0F0,"', "x.csv: no CSV: "),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loads(text, "x.csv")


def test_idle_cells_and_messages_are_passed_over() -> None:
    text = " 0UNSHARD, 0F0 ,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\r\n,1RECV_F0,1F0,1I0,1SEND_B0,1W0\r\n"
    found = loads(text, "x.csv")
    orders = [" ".join(map(str, order)) for order in found.orders]
    assert orders == ["F0.0 B0.0", "F0.1 I0.1 W0.1"]
    assert inspect(found).ok
    batch = loads("0F0,(0SEND_F0;0RECV_B0)BATCH_P2P,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "x.csv")
    assert [" ".join(map(str, order)) for order in batch.orders] == ["F0.0 B0.0", "F0.1 B0.1"]
    pair = loads("0F0,(0F1;0B0)OVERLAP_F_B,0B1", "x.csv")
    assert [str(op) for op in pair.orders[0]] == ["F0.0", "F1.0", "B0.0", "B1.0"]
