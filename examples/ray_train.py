"""A config under Ray Train, which goes on with the workers that are left, and with all once they are back.

python examples/ray_train.py CONFIG.toml STORAGE LEAST MOST
"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from counterflow.integrations.launchers.ray import Loop
from counterflow.training import load_config


def main(config_file: str, storage: str, least: str, most: str) -> None:
    trainer = TorchTrainer(
        Loop(load_config(config_file, ["train.fewer_after=0"])),
        scaling_config=ScalingConfig(num_workers=(int(least), int(most))),
        run_config=RunConfig(
            name="first", storage_path=storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"trained {result.metrics['step']} steps, loss {result.metrics['loss']:.3f}")
    print(f"its last checkpoint is {result.checkpoint.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
