"""Train a model folder of transformers on texts, and say how it goes.

    python examples/hugging_face.py MODEL TEXTS OUT [SECTION.KEY=VALUE ...]

MODEL is a folder of ``save_pretrained`` with its tokenizer, or a name on the hub; TEXTS a text or JSONL file;
OUT/model is what ``from_pretrained`` reads in the end.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from counterflow.training import Callback, load_config
from counterflow.training.run import run
from counterflow.training.training_report import About, Numbers


class Report(Callback):
    """Prints evaluations."""

    def begun(self, about: About, folder: Path) -> None:
        print(f"{about.model}\n{about.scheme} with {about.processes} workers, {about.where}")

    def recorded(self, lines: Sequence[Numbers]) -> None:
        for line in lines:
            if "validation_loss" in line:
                print(f"step {line['step']}: validation loss {line['validation_loss']:.3f}")


def main(model: str, texts: str, out: str, *more: str) -> None:
    """Train; ``more`` are further keys of the config."""
    keys = {"model.kind": "huggingface", "model.path": model, "data.path": texts, "train.out": out}
    sets = [f"{name}={json.dumps(value)}" for name, value in keys.items()]
    usual = ["schedule.scheme=zb-h1", "schedule.stages=2", "train.steps=30"]
    done = run(load_config(sets=[*sets, *usual, *more]), Report())
    if done is not None:  # not on other ranks under torchrun
        print(f"training loss {done[0].training_loss:.3f}; the model is in {done[1] / 'model'}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
