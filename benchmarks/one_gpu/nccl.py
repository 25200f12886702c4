"""Processes that share one GPU over NCCL: numbers are one process's, and lost or stuck ranks end the others.

NCCL refuses two ranks on one device, which it knows by the host and the bus. With another ``NCCL_HOSTID`` for
each process it takes them for different hosts, and uses sockets between them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit import arguments
from torch import Tensor, nn

import counterflow as cf
from counterflow.capture.estimates import estimated_costs
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.cuts import balance
from counterflow.schedule.ir import Schedule
from counterflow.training.trial import CLIP_NORM, small_trial
from counterflow.verification.reference import Staleness
from counterflow.verification.training_agreement import TrainingResult, _train, compare
from one_gpu import Report, case_name

s = cf.schemes

ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # Before the default group is made: a rank that has lost another one ends at once, without a dump.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}
"""Variables of every rank; each has a ``NCCL_HOSTID`` of its own beside them."""

LEAST_SECONDS = 20.0
"""Time without which no ranks are started."""

WAIT_SECONDS = 8.0
"""Time that ranks wait for each other where one is lost or stuck."""


@dataclass(frozen=True, slots=True)
class Job:
    """What ranks run.

    Attributes:
        name: name for the report.
        ranks: number of processes.
        cases: schedules, replicas and options, one after another.
        fault: ``killed`` or ``stuck``: what happens to rank 1 after some steps; empty: nothing.
        seconds: limit of the time.
    """

    name: str
    ranks: int
    cases: tuple[tuple[Schedule, int, dict[str, Any]], ...]
    fault: str = ""
    seconds: float = 40.0
    environment: dict[str, str] = field(default_factory=dict)


def jobs() -> list[Job]:
    """Jobs in the order of their value."""
    two = (
        (s.dapple(2, 3), 1, {}),
        (s.zb_v(2, 3), 1, {"recompute": "stage"}),
        (s.chimera(2, 4), 1, {"sync": "eager"}),
        (s.interleaved(2, 4, chunks=2), 1, {"barrier": False, "clip_norm": None}),
        (s.gpipe(1, 2), 2, {"sync": "eager", "zero_stage": 1}),
        (s.pipedream_2bw(2, 2), 1, {}),
        (s.hanayo(2, 3, waves=2), 1, {"recompute": "layer"}),
        (s.dualpipe_v(2, 4), 1, {}),
        (s.chimera(2, 4, concat="forward-doubling"), 1, {}),
    )
    four = (
        (s.chimera(4, 4), 1, {"sync": "eager"}),
        (s.dapple(2, 3), 2, {"sync": "eager-opt"}),
        (s.zb_v(4, 4), 1, {}),
        (s.dualpipe(4, 8), 1, {}),
        (s.pipedream_2bw(2, 3), 2, {}),
        (s.wpipe(4, 4), 1, {}),
    )
    faulty = ((s.dapple(2, 3), 1, {}),)
    return [
        Job("two ranks", 2, two, seconds=50),
        Job("a killed rank", 2, faulty, "killed", 30),
        Job("a stuck rank", 2, faulty, "stuck", 35),
        Job("four ranks", 4, four, seconds=50),
    ]


# -- a rank, in its own process


class Fault(nn.Module):
    """A layer that ends or stops the process of rank 1 after twelve forwards."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 12 and os.environ["RANK"] == "1":
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return x


def rank_main(job: Job, rows: Path, *, pretend: bool) -> None:
    """Run the cases of a job as one rank, and write a row for each."""
    rank = int(os.environ["RANK"])
    device = "cpu" if pretend else "cuda"
    transport = "nccl-on-gloo" if pretend else "nccl"
    for schedule, replicas, options in job.cases:
        begin = time.perf_counter()
        row: dict[str, Any] = {"case": f"{schedule}" + (f", {replicas} replicas" if replicas > 1 else "")}
        try:
            if job.fault:
                row["error"] = _fails(job, schedule, transport)
            else:
                row["error_size"] = _agrees(schedule, replicas, options, transport, device)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        row["seconds"] = time.perf_counter() - begin
        with (rows / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if "error" in row:
            return


def _agrees(
    schedule: Schedule, replicas: int, options: dict[str, Any], transport: str, device: str
) -> tuple[float, bool]:
    trial = small_trial(schedule, replicas=replicas, steps=3 if schedule.synchronous else 6)
    clip_norm = options.get("clip_norm", CLIP_NORM)
    cuts = balance(estimated_costs(trial.layers), schedule.stages)
    expected = trial.one_process(clip_norm=clip_norm, device=device, staleness=Staleness.of(schedule, cuts))
    given = {"optimizer": trial.optimizer, "flush_after": (), "clip_norm": clip_norm, "digest_every": 1}
    given |= {"timeout_seconds": 30.0, "transport": transport} | options
    mine = _train(schedule, trial.layers, trial.loss, trial.batches, given)
    every = current_transport(transport).gather_objects(_on_host(mine))
    found = compare(_on_host(expected), every)
    return max(found.loss_error, found.norm_error, found.gradient_error, found.weight_error), found.ok


def _on_host(trained: TrainingResult) -> TrainingResult:
    """The same numbers on the CPU, for other processes."""
    tensors = trained.gradients, trained.state
    gradients, state = ({name: t.cpu() for name, t in each.items()} for each in tensors)
    return replace(trained, gradients=gradients, state=state)


def _fails(job: Job, schedule: Schedule, transport: str) -> str:
    """Train until another rank is gone; returns the error that says so."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Fault(job.fault), nn.Linear(8, 8), Fault(job.fault)]
    pipeline = cf.Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule,
        cuts=[2],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        transport=transport,
        timeout_seconds=WAIT_SECONDS,
        witness_every=0,
    )
    x = torch.randn(6, 8)
    for _ in range(20):
        pipeline.step(x, x)
    raise RuntimeError("no step failed")


# -- the ranks of a job


def run_job(report: Report, job: Job) -> bool:
    """Start the ranks of a job, wait for them, and write their rows; return whether the first case ended."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job").write_bytes(pickle.dumps(job))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [_started(report, job, Path(folder), rank, port) for rank in range(job.ranks)]
        seconds = min(job.seconds, max(1.0, report.left()))
        while time.monotonic() - begin < seconds:
            alive = [rank.poll() is None for rank in ranks]
            reported = job.fault and (Path(folder) / "0.jsonl").exists()
            if not any(alive) or (job.fault == "stuck" and not alive[0]) or reported:
                break
            time.sleep(0.05)
        late = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        for rank in ranks:
            rank.kill()
            rank.wait()
        _write_rows(report, job, Path(folder), late, time.monotonic() - begin)
        return (Path(folder) / "0.jsonl").exists()


def _started(report: Report, job: Job, folder: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | ENVIRONMENT | job.environment
    environment |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl_trace_rank_")}
    environment |= {"MASTER_PORT": str(port), "NCCL_HOSTID": f"host-{rank}"}
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks)}
    environment |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    command = [
        sys.executable,
        "-m",
        "one_gpu.nccl",
        "--folder",
        str(folder),
        *(["--pretend"] if report.pretend else []),
    ]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _write_rows(report: Report, job: Job, folder: Path, late: Sequence[int], seconds: float) -> None:
    by_rank = []
    for rank in range(job.ranks):
        path = folder / f"{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        by_rank.append([json.loads(line) for line in lines])
    logs = {rank: (folder / f"{rank}.log").read_text(errors="replace")[-6000:] for rank in range(job.ranks)}
    if job.fault:
        told = by_rank[0][0].get("error", "") if by_rank[0] else ""
        # Over Gloo a host does not see for whom its device waits.
        named = report.pretend or "rank 1" in told or "worker 1" in told
        ends = told.startswith("WorkerError") and named
        logs = {} if ends else logs
        report.add(
            job.name, "agrees" if ends else "failed", told or "rank 0 did not end", seconds=seconds, logs=logs
        )
        return
    for number, (schedule, replicas, options) in enumerate(job.cases):
        every = [rows[number] for rows in by_rank if len(rows) > number]
        name = f"{job.name}: {case_name(schedule, replicas, options)}"
        errors = [row["error"] for row in every if "error" in row]
        if errors:
            report.add(name, "failed", errors[0], logs=logs)
            return
        if len(every) < job.ranks:
            report.add(name, "cut off", f"after {seconds:.0f} s; ranks {list(late)} were running", logs=logs)
            return
        size = max(row["error_size"][0] for row in every)
        agrees = all(row["error_size"][1] for row in every)
        took = max(row["seconds"] for row in every)
        report.add(name, "agrees" if agrees else "differs", error=size, seconds=took)


def rows(report: Report) -> None:
    """All jobs for which there is time."""
    if not report.pretend:
        report.add("version", "measured", ".".join(map(str, torch.cuda.nccl.version())))
    for every in report.cases(jobs()):
        job = replace(every, cases=every.cases[:: report.thin])
        if report.left() < LEAST_SECONDS:
            report.add(job.name, "not available", "no time was left")
            continue
        if run_job(report, job) or report.pretend:
            continue
        again = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "INFO"}
        run_job(report, replace(job, name=f"{job.name}, again", cases=job.cases[:1], environment=again))


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pretend", action="store_true")
    options = parser.parse_args()
    job = pickle.loads((options.folder / "job").read_bytes())
    rank_main(job, options.folder, pretend=options.pretend)
