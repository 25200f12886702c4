"""The program of the page on transformers' Trainer runs under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_on_the_trainer(tmp_path: Path) -> None:
    text = (DOCS / "transformers-trainer.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    command = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0].split()
    (tmp_path / "tune.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
        # With it each print writes its text and its end apart, and two workers' losses may come on one line.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line) for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+", line)]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 3.5
    assert (tmp_path / "tuned" / "final" / "config.json").exists()
