"""Progress of a run on stderr: a bar on a terminal, elsewhere a line now and then.

Invariant: only what the run's metrics contain is drawn, and the terminal is left as it was.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from counterflow.common.plurals import plural
from counterflow.schedule.registry import title
from counterflow.training.callbacks import Callback
from counterflow.training.training_report import About, Numbers

from .console import WIDE, console
from .screen import Screen

_LINE_SECONDS = 10.0
"""Seconds between printed lines if there is no terminal."""

_QUIET_SECONDS = 2.0
"""Seconds after which a start that takes longer prints a line."""

_RECENT = 20
"""Number of recent steps over which the speed is averaged."""

_NARROW = 72
"""Width in columns below which no bar is drawn."""


class TrainProgress(Callback):
    """Shows a run.

    Args:
        introduces: whether to print what is trained, on stdout.
    """

    def __init__(self, *, introduces: bool) -> None:
        self.introduces = introduces
        self.console = Screen(stderr=True, highlight=False)
        self.bar: Bar | None = None
        self.task: Any = None
        self.about: About
        self.started, self.next_line = time.monotonic(), _QUIET_SECONDS
        self.seen: dict[str, float] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)

    def begun(self, about: About, folder: Path) -> None:
        """Print what is trained, and start the bar."""
        self.about = about
        if self.introduces:
            out = console(WIDE)
            for index, line in enumerate(introduction(about)):
                out.print(Text(line, style="" if index else "bold"))
            sys.stdout.flush()
        self.started = time.monotonic()
        self._print(f"starting {plural(about.processes, 'worker')}; results go to {folder}")
        if self.console.is_terminal:
            self._print("Ctrl-C ends it after the step in flight, and keeps a checkpoint")
            self._put_up()

    def recorded(self, lines: Sequence[Numbers]) -> None:
        """Move the bar; print evaluations and, if there is no bar, a step now and then."""
        if not lines and not self.seen:
            self._waits()
        if lines and not self.seen:
            self.next_line = 0.0
        for line in lines:
            self.seen |= line
            if "validation_loss" not in line:
                self.recent.append((line["step"], line["seconds"]))
            if "validation_loss" in line:
                average = line.get("ema_validation_loss")
                self._print(
                    f"step {line['step']:,}  validation loss {line['validation_loss']:.3f}  "
                    + ("" if average is None else f"of the average {average:.3f}  ")
                    + f"training loss {self.seen.get('loss', math.nan):.3f}"
                )
            elif self.bar is None and line["seconds"] >= self.next_line:
                self.next_line = line["seconds"] + _LINE_SECONDS
                self._print(self._line(line))
        if lines and self.bar is not None:
            self.bar.update(self.task, completed=self.seen["step"], shown=self._shown())

    def happened(self, event: str) -> None:
        """Print a failure or a restart."""
        self._print(event)

    def ended(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _waits(self) -> None:
        waited = time.monotonic() - self.started
        if waited < self.next_line:
            return
        self.next_line = waited + _LINE_SECONDS
        doing = "workers load PyTorch, make their stages and time their ops"
        if self.bar is not None:
            self.bar.update(self.task, shown=f"{doing}, {duration(waited)}")
        else:
            self._print(f"{doing}; no step yet after {duration(waited)}")

    def _put_up(self) -> None:
        wide = self.console.width >= _NARROW
        columns = [
            TextColumn("step"),
            MofNCompleteColumn(),
            *([BarColumn(bar_width=None)] if wide else []),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            *([TextColumn("left")] if wide else []),
        ]
        self.bar = Bar(*columns, console=self.console, transient=True, expand=wide)
        self.task = self.bar.add_task(
            "", total=self.about.steps, completed=self.about.first_step, shown="starting workers"
        )
        self.bar.start()

    def _shown(self) -> str:
        seen = self.seen
        if "loss" not in seen:
            return ""
        (first, began), (last, ended) = self.recent[0], self.recent[-1]
        speed = seen["samples_per_second"]
        if last > first and ended > began:  # the speed of a single step would vary too much
            speed = (last - first) * self.about.samples / (ended - began)
        return f"loss {seen['loss']:.3f}  {speed:.3g} samples/s"

    def _line(self, line: Numbers) -> str:
        steps = line["step"] - self.about.first_step
        remaining = line["seconds"] / steps * (self.about.steps - line["step"])
        return f"step {line['step']:,}/{self.about.steps:,}  {self._shown()}  {duration(remaining)} left"

    def _print(self, text: str) -> None:
        (self.bar.console if self.bar else self.console).print(Text(text), soft_wrap=True)


def introduction(about: About) -> list[str]:
    """Describe the model, the data and the pipeline of a training, as lines."""
    layers = ", ".join(f"{a}–{b}" if a != b else str(a) for a, b in about.stage_layers)
    options = " ".join(f"{name}={value}" for name, value in about.options.items())
    copies = f" · {about.replicas} replicas" if about.replicas > 1 else ""
    sizes = " x ".join(f"{name} {size}" for name, size in about.mesh.items())
    positions = f", each on {sizes} ranks: {about.processes} in all" if sizes else ""
    going_on = f", resumes from step {about.first_step:,}" if about.first_step else ""
    return [
        f"{about.model}: {about.parameters:,} parameters",
        f"{about.text}: {about.text_bytes:,} bytes, unigram entropy {about.unigram_entropy:.3f} nats "
        f"a {about.target}",
        f"{title(about.scheme)} {options}",
        f"{plural(about.workers, 'worker')}{copies}{positions} · "
        f"{plural(len(about.stage_layers), 'stage')} (layers {layers})",
        f"{plural(about.steps, 'step')}{going_on}, each {plural(about.samples, 'sample')} of "
        f"{about.positions:,} "
        f"{about.unit}s in {plural(about.micro_batches * about.sample_shares, 'micro-batch')}",
        f"workers compute {about.where}",
        *([f"resumes from {about.resumed}"] if about.resumed else []),
        *(f"changed: {change}" for change in about.changed),
    ]


def duration(seconds: float) -> str:
    """A duration as people say it.

    >>> duration(3.21), duration(75), duration(7300)
    ('3.2 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
