"""Writes checkpoints while the training continues: one object per worker, whose methods all workers call
alike.

``start`` begins to copy what this worker writes to the CPU, and a thread writes it into a draft. ``poll``
agrees, by one small gather, on whether all have written; then rank 0 writes the index and gives the draft its
name. No worker waits in a collective for a disk, so a write may take longer than any timeout.

Invariant: a folder ``step-N`` exists complete or not at all. A failure (a full disk, a lost mount) leaves no
draft and touches no other checkpoint; it is reported, and training may continue. A complete checkpoint is the
last one: those of later steps, which the training has gone back behind, are renamed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import to_jsonable_python

from counterflow.errors import ConfigError, CounterflowError
from counterflow.runtime.pipeline import Pipeline

from . import files
from .exclusion import set_aside, set_aside_after
from .host_copies import HostCopies
from .index import INDEX, Index, Written, complete, draft_of, name_of, remove_drafts
from .reader import damage
from .renames import put
from .state_tables import at_hand, changing_in_forward, file_of, first_names, name_in_file

if TYPE_CHECKING:
    from .dcp import Pieces

_LOG = logging.getLogger(__name__)

Extra = bytes | Callable[[], Iterable[bytes]]
"""A further file of a checkpoint, or a function that makes it piece by piece."""

_LOOK_SECONDS = 1.0
"""Seconds between checks of workers that have written for the others, while all wait."""

PATIENCE_SECONDS = 30.0
"""Seconds that a save waits for the previous one before it is skipped."""

_TELL_SECONDS = 60.0
"""Seconds between reports that a write is in progress, while all wait for it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a checkpoint: it is complete at ``path``, or ``problem`` says why there is none."""

    step: int
    path: Path | None
    problem: str = ""


class Saver:
    """Writes one worker's part of checkpoints.

    Args:
        pipeline: pipeline to save.
        root: folder of checkpoints on storage that all workers share; nothing else writes there.
        keep_last: number of last checkpoints that are kept; None: all.
        keep_best: whether the checkpoint with the lowest ``validation_loss`` is kept too.
        over: called by threads that write; returns whether others write there by now, which a worker that was
            frozen or cut off does not know. Then its files are removed, and it completes nothing; but time
            passes between the last check and the rename of a checkpoint.

    Raises:
        ConfigError: ``keep_last`` is less than 1.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        root: Path,
        *,
        keep_last: int | None = None,
        keep_best: bool = False,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError(
                f"keep_last = {keep_last}: the last checkpoint is kept; give 1 or more, or None"
            )
        self.pipeline, self.root = pipeline, root
        self._over = over
        self.keep_last, self.keep_best = keep_last, keep_best
        self.in_flight: int | None = None
        """Step of the checkpoint that is being written."""
        self.last: Outcome | None = None
        """Result of the last checkpoint that ended."""
        self._copies = HostCopies(pipeline.device)
        self._transport = pipeline.transport
        self._writes_index = self._transport.rank == 0
        self._thread: threading.Thread | None = None
        self._result: Any = None
        """Result of the thread: files if it wrote, None if it completed, or a text with the problem."""
        self._index: dict[str, Any] = {}
        self._completing = False
        self._losses: dict[Path, float] = {}
        self._transport.gather([])  # nobody reads folders that are renamed back
        if self._writes_index:
            with contextlib.suppress(OSError):
                remove_drafts(root)
        # A worker that was frozen and continues after others took over must not write among their files.
        self._mark = str(
            self._transport.gather_objects(secrets.token_hex(4))[0]
        )  # earlier drafts are removed

    def start(
        self, about: Mapping[str, Any], extras: Mapping[str, Extra] | None = None, *, overlap: bool = False
    ) -> None:
        """Begin a checkpoint of the pipeline's current state, with nothing in flight; all workers call it.

        The host does not wait for the device, whose further work runs after the weights are copied.

        Args:
            about: entries for the index; rank 0's are used.
            extras: further files, or functions that make them while the pipeline continues; rank 0's are
                used.
            overlap: whether only the pipeline changes weights before the next step, so that step computes
                while they are copied, and only its update waits.

        Raises:
            ConfigError: gradients or another checkpoint are in flight, or an object or entry cannot be
                serialised.
            WorkerError: the copies of a stage differ.
        """
        from .dcp import SavePlan  # noqa: PLC0415 - it takes a while

        pipeline, entries = self.pipeline, _entries(about)
        if self.in_flight is not None:
            raise ConfigError(
                f"the checkpoint of step {self.in_flight} is still being written; call wait() before the next"
            )
        pipeline.settle("a checkpoint")
        pipeline.weights.check_copies(f"after {pipeline.steps} steps")
        tensors, objects = at_hand(pipeline)
        plan = SavePlan(tensors | objects, self._transport)
        part, object_keys = plan.part()
        further = dict(extras or {}) if self._writes_index else {}
        if object_keys:
            packed = _packed({key: objects[key] for key in object_keys})
            further[file_of(object_keys[0], self._transport.rank, tensor=False)] = packed
        step, draft = pipeline.steps, self.root / draft_of(pipeline.steps, self._mark)
        if self._writes_index:
            aliases: dict[str, list[str]] = {}
            for name, first in first_names(pipeline).items():
                aliases.setdefault(first, []).append(name)
            schedule = pipeline.schedule
            self._index = {
                "step": step,
                "seed": pipeline.streams.seed,
                "layout": f"{schedule}, {pipeline.replicas} replica{'s' if pipeline.replicas > 1 else ''}",
                "tensors": plan.tensors(),
                "objects": plan.objects(),
                "aliases": aliases,
                "about": entries,
            }
        self.in_flight, self._completing = step, False
        live = {key: tensor for key, (tensor, _) in part.items()}
        copy = self._copies.begin(live, changing_in_forward(pipeline, live))
        if overlap:
            pipeline.weights.change_after(copy.order)
        else:
            copy.order()
        copied = {key: (copy.tensors[key], begins) for key, (_, begins) in part.items()}

        def write() -> dict[str, Written]:
            try:
                copy.wait()
                return self._write(draft, copied, further)
            finally:
                self._copies.forget()

        self._begin(write)

    def poll(self) -> Outcome | None:
        """Agree on whether the checkpoint in flight is written; all workers call it.

        Returns:
            Its result, once; None while it is being written, or if there is none.
        """
        if self.in_flight is None:
            return None
        busy = self._thread is not None and self._thread.is_alive()
        if any(row[0] for row in self._transport.gather([float(busy)])):
            return None
        rows = self._transport.gather_objects(self._result)
        problem = next((row for row in rows if isinstance(row, str)), None)
        step = self.in_flight
        if problem is None and not self._completing:
            self._completing, self._result = True, None
            if self._writes_index:
                written = cast("list[dict[str, Written]]", rows)
                self._begin(lambda: self._complete(step, {n: f for row in written for n, f in row.items()}))
            return None
        self.in_flight, self._thread, self._result = None, None, None
        self.last = Outcome(step, None if problem is not None else self.root / name_of(step), problem or "")
        if problem is None:
            return self.last
        if self._writes_index:
            shutil.rmtree(self.root / draft_of(step, self._mark), ignore_errors=True)
            _LOG.warning("the checkpoint of step %d is not written: %s%s", step, problem, self._earlier())
        return self.last

    def wait(self, limit_seconds: float | None = None) -> Outcome | None:
        """Wait until the checkpoint in flight is written; all workers call it.

        Args:
            limit_seconds: maximum wait by rank 0's clock; None: without limit.

        Returns:
            Its result; None if there is none, or if it is still in flight.
        """
        began = logged = time.monotonic()
        look = min(_LOOK_SECONDS, self._transport.timeout_seconds / 4)
        while self.in_flight is not None:
            if self._thread is not None:
                self._thread.join(look)
            outcome = self.poll()
            if outcome is not None:
                return outcome
            now = time.monotonic()
            if self._writes_index and now - logged > _TELL_SECONDS:
                logged = now
                _LOG.warning("the checkpoint of step %s is still being written", self.in_flight)
            if limit_seconds is not None:
                rows = self._transport.gather([float(now - began > limit_seconds)])
                if rows[0][0]:
                    return None
        return None

    def _earlier(self) -> str:
        return "; earlier ones are whole" if complete(self.root) else "; there is no earlier one"

    # -- in a thread

    def _begin(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                self._result = work()
            except OSError as error:
                where = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
                self._result = f"{where}{error.strerror or error}"
            except CounterflowError as error:
                self._result = str(error)
            except BaseException as error:
                self._result = f"{type(error).__name__}: {error}"

        # A thread that waits for a lost mount must not keep the process from ending.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, draft: Path, part: Pieces, further: Mapping[str, Extra]) -> dict[str, Written]:
        draft.mkdir(parents=True, exist_ok=True)
        self._check(
            draft
        )  # after the draft exists, so an attempt that begins after the check finds and removes it
        rank = self._transport.rank
        parts: dict[str, Pieces] = {}
        for key, piece in part.items():
            parts.setdefault(file_of(key, rank, tensor=True), {})[name_in_file(key)] = piece
        written: dict[str, Written] = {}
        for file, pieces in parts.items():
            tensors = {name: tensor for name, (tensor, _) in pieces.items()}
            offsets = {name: offset for name, (_, offset) in pieces.items()}
            written[file] = files.write_tensors(
                draft / file, files.sizes_of(tensors), tensors.__getitem__, offsets
            )
        for name, data in further.items():
            written[name] = files.write(draft / name, data() if callable(data) else [data])
        files.settle(draft)
        self._check(draft)  # an attempt that began meanwhile may have removed a part of it
        return written

    def _check(self, draft: Path) -> None:
        if self._over():
            shutil.rmtree(draft, ignore_errors=True)
            raise CounterflowError("others write there by now, or the run has ended")

    def _complete(self, step: int, written: Mapping[str, Written]) -> None:
        draft, folder = self.root / draft_of(step, self._mark), self.root / name_of(step)
        self._check(draft)
        index = Index(**self._index, files=dict(written))
        for name, file in index.files.items():
            problem = files.problem_of(draft / name, file, contents=False)
            if problem:
                raise CounterflowError(
                    f"rank 0 does not see {draft / name} as another worker wrote it ({problem}); use a "
                    "folder on storage that all machines share"
                )
        files.write(draft / INDEX, [index.dumps()])
        files.settle(draft)
        self._check(draft)
        put(draft, folder)
        files.settle(self.root)
        set_aside_after(self.root, step)
        self._remove_old(folder)

    def _remove_old(self, last: Path) -> None:
        if self.keep_last is None:
            return
        checkpoints = []
        for path in complete(self.root):
            problem = damage(path)
            if problem:  # it does not count in place of a whole one
                set_aside(path, problem)
            else:
                checkpoints.append(path)
        # Those of another version and of later steps still have their names, and do not count in its place.
        remaining = {last, *checkpoints[-self.keep_last :]}
        if self.keep_best:
            losses = {path: self._loss(path) for path in checkpoints}
            best = min(checkpoints, key=lambda path: losses[path])
            if losses[best] < math.inf:
                remaining.add(best)
        for path in checkpoints:
            if path not in remaining:
                # Without its index it is not a checkpoint: it is complete or absent also while it is removed.
                (path / INDEX).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                self._losses.pop(path, None)

    def _loss(self, path: Path) -> float:
        if path not in self._losses:
            try:
                loss = Index.load(path / INDEX, str(path)).about.get("validation_loss")
            except ConfigError:
                loss = None
            # A loss that is not a number would compare as the least.
            if not isinstance(loss, float) or math.isnan(loss):
                loss = math.inf
            self._losses[path] = loss
        return self._losses[path]


def _entries(about: Mapping[str, Any]) -> dict[str, Any]:
    entries = {}
    for name, value in about.items():
        try:
            entries[name] = to_jsonable_python(value, inf_nan_mode="constants")
        except ValueError as error:
            raise ConfigError(
                f"a checkpoint cannot store the entry {name!r}, a {type(value).__name__} ({error}); give "
                "texts, Python's numbers, or lists and dicts of them"
            ) from None
    return entries


def _packed(objects: Mapping[str, Any]) -> bytes:
    """Bytes of objects other than tensors, which torch reads without code execution.

    Raises:
        ConfigError: reading an object would execute code.
    """
    data = files.packed(dict(objects))
    try:
        files.unpacked(data)
    except Exception as error:
        for key, value in objects.items():
            if len(objects) > 1:
                _packed({key: value})
            else:
                raise ConfigError(
                    f"{key} contains an object that a checkpoint does not support; use only numbers, texts, "
                    "lists, dicts and "
                    "tensors, which are read back without running code from a file "
                    f"({str(error).splitlines()[0][:200]})"
                ) from None
        raise
    return data
