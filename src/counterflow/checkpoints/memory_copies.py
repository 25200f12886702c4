"""Copies of workers' state in their machines' memory: a run resumes from them without reading storage.

After a step each worker copies its weights and its optimiser's state into a file in memory (/dev/shm). The
file outlives the worker's process, but not its machine: if a machine is gone, its stages come from the
machines of other workers that hold them. There are two files, and one is whole while the other is written.
The device makes the copy and a thread writes it while the next step computes; only that step's update waits
for the device's part.

Optimiser state that is sharded over a stage's holders exists once: if its owner's machine is gone, no copy in
memory is used, and the run resumes from a checkpoint.

Invariant: a file counts only if it is whole, and a step only if every part of every stage has a holder and
all holders of a part have equal bytes; a run resumes from the newest such step. So a worker that was frozen
may finish a file after others have gone on: the file belongs to a step that all had made, in its own layout,
and the new worker of its rank has files of its own. No checkpoints are made here: without a usable copy the
last checkpoint is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from counterflow.errors import ConfigError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.transport.base import Transport

from .files import packed, unpacked
from .host_copies import HostCopies
from .memory_file import MemoryFile, opened
from .memory_parts import Part, overlapping, owned_elsewhere, parts_of
from .state_tables import at_hand, changing_in_forward, prepare

_LOG = logging.getLogger(__name__)

ROOT = Path("/dev/shm")  # noqa: S108 - in a folder that only this user reads
"""Linux's file system in memory."""

Records = list[dict[str, float]]


class MemoryCopy(NamedTuple):
    """Contents of a file.

    Attributes:
        layout: the layers with which its stages begin, after the first.
        step: number of updates made.
        name: name of the file.
        digests: digests of its parts.
        records: the lines of the metrics of that step.
        needed: all parts of its stages.
    """

    layout: tuple[int, ...]
    step: int
    name: str
    digests: dict[Part, str]
    records: Records
    needed: frozenset[Part]


class ResumePoint(NamedTuple):
    """State from which a run can resume.

    Attributes:
        layout: the layers with which these stages begin, after the first.
        step: number of updates made.
        records: lines of the metrics of that step.
        sources: by part, the rank that sees a file with it, and the file's name.
    """

    layout: tuple[int, ...]
    step: int
    records: Records
    sources: dict[Part, list[tuple[int, str]]]


class MemoryCopies:
    """One worker's copies.

    Args:
        transport: transport of the workers.
        run: name of this run's copies, on all machines.
        layout: the layers with which stages 1, 2, … begin.
        root: folder of files in memory.

    Raises:
        ConfigError: another user made the folder, or may access it.
    """

    def __init__(
        self, transport: Transport, run: str, layout: Sequence[int], *, root: Path | None = None
    ) -> None:
        self.folder = folder_of(run, root)
        self.layout = tuple(layout)
        self._transport = transport
        self._machines: list[str] = []
        """Machines by rank, known after all workers have looked for copies."""
        self._slots = [MemoryFile(self.folder / f"rank-{transport.rank}.{turn}") for turn in (0, 1)]
        self._turn = 0
        self._full = False
        self._copies = HostCopies(transport.device)
        self._writer: threading.Thread | None = None
        self._failed: BaseException | None = None
        """Why the last copy is incomplete."""
        _make(self.folder)

    def keep(self, pipeline: Pipeline, records: Records) -> None:
        """Begin to copy this worker's state, with nothing in flight, after the previous copy is complete.

        The pipeline's next update waits until the device has made the copy; until then nothing else may
        change weights. A thread writes the file.

        Args:
            pipeline: pipeline after a step.
            records: lines of the metrics of that step.
        """
        self.settle()
        if self._full:
            return
        tensors, objects = at_hand(pipeline)
        if pipeline.dims.has_dtensors:
            raise ConfigError(
                "copies in memory contain whole weights, but this mesh shards them; set train.memory_every = "
                "0"
            )
        parts = parts_of(pipeline, [*tensors, *objects])
        about = packed(
            {
                "step": pipeline.steps,
                "objects": objects,
                "parts": parts,
                "needed": [*parts, *owned_elsewhere(pipeline)],
                "layout": self.layout,
                "records": records,
            }
        )
        slot = self._slots[self._turn]
        copy = self._copies.begin(tensors, changing_in_forward(pipeline, tensors))
        pipeline.weights.change_after(copy.order)

        def write() -> None:
            try:
                copy.wait()
                slot.write(copy.tensors, about)
            except BaseException as error:  # raised by ``settle``
                self._failed = error

        # A daemon, because a device that hangs must not keep the process from ending.
        self._writer = threading.Thread(target=write, name="copy to memory", daemon=True)
        self._writer.start()

    def settle(self) -> None:
        """Wait until the copy that was begun is complete, and report its result."""
        if self._writer is None:
            return
        self.wait()
        self._writer, failed, self._failed = None, self._failed, None
        if failed is None:
            self._turn = 1 - self._turn
        elif isinstance(failed, OSError):
            self._full = True
            self.clear()
            _LOG.warning(
                "%s has no room for copies of weights (%s): a restart resumes from a checkpoint; "
                "train.memory_every = 0 makes none",
                self.folder,
                failed.strerror,
            )
        else:
            raise failed

    def wait(self, limit_seconds: float | None = None) -> None:
        """Wait for a copy that is being written, at most this long; None: without limit."""
        if self._writer is not None:
            self._writer.join(limit_seconds)

    def find(self) -> ResumePoint | None:
        """State from which all can resume; all workers call it before they copy anything.

        Copies of another layout count too: they were made with more or fewer workers.
        """
        self._machines = cast("list[str]", self._transport.gather_objects(_machine(self.folder)))
        rank = self._transport.rank
        here = [peer for peer, machine in enumerate(self._machines) if machine == self._machines[rank]]
        files = sorted(self.folder.glob("rank-*"))[here.index(rank) :: len(here)]
        holdings = [holding for path in files if (holding := holding_of(path)) is not None]
        point = choose(cast("list[list[MemoryCopy]]", self._transport.gather_objects(holdings)), self.layout)
        if point is not None:
            used = {name for holder, name in chain(*point.sources.values()) if holder in here}
            self._turn = int(self._slots[0].path.name in used)  # the other file is the one to write next
        return point

    def restore(self, point: ResumePoint, pipeline: Pipeline) -> None:
        """Load found state into a pipeline of this layout; all workers call it.

        Args:
            point: result of ``find``.
            pipeline: a pipeline of any scheme.
        """
        transport = pipeline.transport
        stages_needed = overlapping(pipeline.stages, self.layout, point.layout)
        needs = cast("list[list[int]]", transport.gather_objects(stages_needed))
        state: dict[str, Any] = {}
        for tag, (part, holders) in enumerate(sorted(point.sources.items())):
            first, name = holders[0]
            for rank in (rank for rank, stages in enumerate(needs) if part[0] in stages):
                near = [n for holder, n in holders if self._machines[holder] == self._machines[rank]]
                if near:
                    if rank == transport.rank:
                        state |= _read_part(self.folder / near[0], part)
                elif rank == transport.rank:
                    (blob,) = transport.receive_described(first, tag).wait()
                    state |= unpacked(bytes(blob.cpu().numpy().data))
                elif first == transport.rank:
                    sent = bytearray(packed(_read_part(self.folder / name, part)))
                    blob = torch.frombuffer(sent, dtype=torch.uint8).to(transport.device)
                    transport.send_described([blob], rank, tag).wait()
        prepare(pipeline, state, "the workers' memory", options=False)()
        pipeline.steps = point.step
        transport.gather([])  # nobody writes before all have read

    def clear(self) -> None:
        """Free this worker's memory."""
        self.settle()
        for slot in self._slots:
            slot.remove()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def forget(self) -> None:
        """Free all memory of the run on this machine, also that of workers that are gone; all workers call
        it.
        """
        self._transport.gather([])
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def choose(rows: Sequence[Sequence[MemoryCopy]], current_layout: Sequence[int]) -> ResumePoint | None:
    """The newest step for which every part of every stage exists, the same on all ranks.

    Args:
        rows: files that each rank found.
        current_layout: the layout that is preferred if there are several of that step.
    """
    candidates = {
        (holding.step, holding.layout == tuple(current_layout), holding.layout)
        for row in rows
        for holding in row
    }
    for step, _, layout in sorted(candidates, reverse=True):
        sources: dict[Part, list[tuple[int, str]]] = {}
        digests: dict[Part, set[str]] = {}
        needed: set[Part] = {(stage,) for stage in range(len(layout) + 1)}
        records: Records = []
        for rank, row in enumerate(rows):
            for holding in row:
                if (holding.step, holding.layout) != (step, layout):
                    continue
                records = records or holding.records
                needed |= holding.needed
                for part, digest in holding.digests.items():
                    sources.setdefault(part, []).append((rank, holding.name))
                    digests.setdefault(part, set()).add(digest)
        differing = [part for part, values in digests.items() if len(values) > 1]
        missing = sorted(needed - sources.keys())
        if differing:
            _LOG.warning(
                "the copies of stage %d in memory differ after step %d: not used", differing[0][0], step
            )
        elif not missing:
            return ResumePoint(layout, step, records, sources)
        elif all(len(part) > 1 for part in missing):
            _LOG.warning(
                "the weights after step %d are in memory, but optimiser state of stage %d, which only rank "
                "%d "
                "had, is gone with its machine: not used",
                step,
                *missing[0],
            )
    return None


def folder_of(run: str, root: Path | None = None) -> Path:
    """Folder of a run's copies on this machine."""
    return (root or ROOT) / f"counterflow-{os.getuid()}-{run}"


def _make(folder: Path) -> None:
    """Make a folder where everybody may make one; an existing one must belong to this user alone.

    Raises:
        ConfigError: the folder does not.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "a link" if stat.S_ISLNK(status.st_mode) else "no folder"
    elif status.st_uid != os.getuid():
        problem = f"user {status.st_uid}'s, but this process is user {os.getuid()}'s"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"open to others (mode {stat.S_IMODE(status.st_mode):o}, but it has to be 700)"
    if problem:
        raise ConfigError(
            f"{folder}: is {problem}; remove it, or make no copies in memory (train.memory_every = 0)"
        )


def forget(run: str, root: Path | None = None) -> None:
    """Free all memory of a run's copies on this machine."""
    shutil.rmtree(folder_of(run, root), ignore_errors=True)


def holding_of(path: Path) -> MemoryCopy | None:
    """Contents of a file, if it is complete."""
    record = opened(path)
    if record is None:
        return None
    about, tensors = record
    digests = {}
    for part, keys in about["parts"].items():
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(keys):
            value = tensors.get(key)
            if value is None:
                digest.update(f"{key} {about['objects'][key]!r}".encode())
            else:
                digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests[part] = digest.hexdigest()
    layout, needed = tuple(about["layout"]), frozenset(about["needed"])
    return MemoryCopy(layout, about["step"], path.name, digests, about["records"], needed)


def _read_part(path: Path, part: Part) -> dict[str, Any]:
    record = opened(path)
    assert record is not None, f"{path} was complete before"
    about, tensors = record
    state = about["objects"] | tensors
    return {key: state[key] for key in about["parts"][part]}


def _machine(folder: Path) -> str:
    status = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else ''} {status.st_dev} {status.st_ino}"
