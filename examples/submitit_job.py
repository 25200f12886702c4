"""A config as a job of submitit that goes on by itself: under Slurm where there is one, else on this machine.

python examples/submitit_job.py CONFIG.toml OUT
"""

import sys

import submitit

from counterflow.integrations.launchers.submitit import Task
from counterflow.training import load_config

MACHINES, MINUTES = 1, 240


def main(config_file: str, out: str) -> None:
    config = load_config(config_file, out=out)
    executor = submitit.AutoExecutor(f"{out}-jobs")  # pickles and logs; all machines see it
    executor.update_parameters(
        nodes=MACHINES,
        tasks_per_node=config.processes // MACHINES,
        timeout_min=MINUTES,
        slurm_signal_delay_s=300,  # seconds before the end, for a step and a checkpoint
    )
    job = executor.submit(Task(config))
    print(f"job {job.job_id}; its logs are in {out}-jobs")
    summary = job.results()[0]  # of rank 0; waits for the end
    print(f"trained {summary.steps} steps, loss {summary.training_loss:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
