"""A run of four workers under Ray Train that loses two with a node: python benchmarks/ray_elastic.py [--keep]

Two nodes of Ray on this machine have two CPUs each, and ``num_workers=(2, 4)``. After some steps the second
node is removed with its workers, and the run goes on with two. Losses are compared with those of a run that
nothing disturbs. Needs ``pip install "counterflow[ray]"``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
from kit import arguments
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from counterflow.integrations.launchers.ray import FOLDER, Loop
from counterflow.training import load_config
from counterflow.training.folder import read_metrics
from counterflow.training.run import run
from counterflow.training.supervision.events import FEWER, RESTARTED, read

KEPT = Path(__file__).parent / "results" / "ray_elastic.txt"
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
SETS = [
    *("model.layers=6", "model.hidden=32", "model.heads=2", "model.positions=32", "train.samples=16"),
    *("train.steps=300", "train.checkpoint_every=10", "train.keep_last=3", "train.evaluate_every=0"),
    *("train.threads=1", "schedule.scheme=chimera", "schedule.stages=4", "optimizer.warmup_steps=10"),
]
REMOVED_AFTER = 30


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def main() -> None:
    parser = arguments(__doc__, "ray_elastic.*")
    keep = parser.parse_args().keep
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as place:
        told = elastic(Path(place))
    text = "\n".join(told) + "\n"
    print(text, end="")
    if keep:
        KEPT.write_text(text)


def elastic(place: Path) -> list[str]:
    run(load_config(None, [*SETS, "pipeline.transport=local"], out=place / "undisturbed"))
    node = {"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = TorchTrainer(
        Loop(load_config(None, [*SETS, "pipeline.transport=gloo", "train.fewer_after=0"])),
        scaling_config=ScalingConfig(num_workers=(2, 4)),
        run_config=RunConfig(
            name="first", storage_path=str(place), failure_config=FailureConfig(max_failures=3)
        ),
    )
    folder = place / "first" / FOLDER
    threading.Thread(target=disturb, args=(cluster, second, folder), daemon=True).start()
    began = time.perf_counter()
    result = trainer.fit()
    seconds = time.perf_counter() - began
    ray.shutdown()
    cluster.shutdown()
    undisturbed, found = losses(place / "undisturbed"), losses(folder)
    worst = max(abs(one / other - 1) for one, other in zip(found, undisturbed, strict=True))
    return [
        "Ray Train, num_workers=(2, 4): a node of two workers is removed",
        *(described(event) for event in read(folder) if event["event"] in (FEWER, RESTARTED)),
        f"{len(found)} steps in {seconds:.0f} s, with {os.cpu_count()} cores; result.checkpoint is "
        f"{Path(result.checkpoint.path).name}",
        f"losses differ from those of the undisturbed run by at most {worst:.1e} relative",
    ]


def disturb(cluster: Cluster, second: object, folder: Path) -> None:
    """Remove the second node after some steps."""
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < REMOVED_AFTER:
        time.sleep(0.05)
    cluster.remove_node(second, allow_graceful=False)


def described(event: dict[str, object]) -> str:
    if event["event"] == FEWER:
        return f"{event['workers']} workers run {event['runs']}"
    return f"restart {event['attempt']}: after step {event['step']}, from {event['source']}"


if __name__ == "__main__":
    main()
