"""A config under Monarch, with an actor a worker on this host.

python examples/monarch_train.py CONFIG.toml OUT
"""

import sys

from counterflow.integrations.launchers.monarch import train
from counterflow.training import Callback, load_config


class Failures(Callback):
    """Prints that a process ended, as Monarch reports it."""

    def happened(self, event: str) -> None:
        print(f"event: {event}")


def main(config_file: str, out: str, *callbacks: Callback) -> None:
    summary = train(load_config(config_file, out=out), Failures(), *callbacks, max_restarts=3)
    assert summary is not None, f"{out}: all steps were made before"
    print(f"trained {summary.steps} steps, loss {summary.training_loss:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
