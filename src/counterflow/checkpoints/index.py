"""The index of a checkpoint, ``checkpoint.json``, and the folders that contain a complete one. torch is not
imported.

Invariant: an index that is read has the digest it was written with, and names only files in its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterflow.errors import ConfigError

from .renames import rename

FORMAT: Final = "counterflow-checkpoint"
VERSION: Final = 4
INDEX = "checkpoint.json"
"""Index file, written last into the draft of a checkpoint."""

METADATA = ".metadata"
"""The file by which a folder is one of torch.distributed.checkpoint."""

CHECKPOINT = "checkpoint"
"""Folder of checkpoints in the folder of a run."""

RUN = "counterflow"
"""Entry of a checkpoint's ``about`` with what `counterflow train` notes; the others are users' own."""

_OF_RUNS = {"config", "optimizer", "samples"}
"""Entries of runs that had no entry of their own."""

_FOLDER = re.compile(r"step-(\d{1,18})")
_DRAFT = re.compile(r"\.step-\d{1,18}\.([0-9a-f]+\.)?(draft|old)")
_ASIDE = re.compile(r"\.step-(\d{1,18})\.old")

Count = Annotated[int, Field(ge=0, lt=2**63)]
FileName = Annotated[str, Field(pattern=r"^[a-z]+(-\d+)?\.[a-z]+$")]


class DamagedError(ConfigError):
    """Data on the disk differ from those that were written.

    Attributes:
        problem: what differs, with its path and without advice.
    """

    problem: str = ""


class _IndexModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Chunk(_IndexModel):
    """A piece of a tensor: its file, where it begins in the whole, and its shape."""

    file: FileName
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class Stored(_IndexModel):
    """A tensor: its dtype and shape, and its pieces."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...] = Field(min_length=1)


class Written(_IndexModel):
    """A file: its length, and the digest of its contents."""

    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Index(_IndexModel):
    """Contents of a checkpoint.

    Attributes:
        format: name of the format.
        format_version: version of the format.
        step: number of updates made.
        seed: seed that, with the step, determines all random draws.
        layout: scheme, depth and width of the pipeline that wrote it, in words.
        tensors: tensors by key: ``model/NAME`` or ``optimizer/NAME/SLOT``, with the model's own names.
        objects: by key, files of objects other than tensors: options, schedulers, extra state.
        aliases: further names of weights, by the first one.
        files: files by name, except this index.
        about: additions of the writer; ``validation_loss`` decides which checkpoint is the best.
    """

    format: Literal["counterflow-checkpoint"] = FORMAT
    format_version: Literal[4] = VERSION
    step: Count
    seed: int
    layout: str
    tensors: dict[str, Stored]
    objects: dict[str, FileName]
    aliases: dict[str, tuple[str, ...]]
    files: dict[FileName, Written]
    about: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        """Entries of the run that wrote it; empty if a program wrote it."""
        entries = self.about.get(RUN, self.about)
        return entries if isinstance(entries, dict) and entries.keys() >= _OF_RUNS else {}

    @property
    def has_training(self) -> bool:
        """Return whether optimiser state exists; it does not if a training begins with given weights."""
        return any(key.startswith("options/") for key in self.objects)

    def dumps(self) -> bytes:
        """The text of ``checkpoint.json``, with its own digest."""
        data = self.model_dump(mode="json")
        return (json.dumps({"digest": _digest(data), "checkpoint": data}, indent=1) + "\n").encode()

    @classmethod
    def load(cls, path: Path, place: str) -> Index:
        """Read a ``checkpoint.json``.

        Args:
            path: path of the file.
            place: what names the file, for errors.

        Raises:
            DamagedError: the file cannot be read, is something else or was changed.
            ConfigError: the checkpoint has another version.
        """
        subject = "" if place.endswith(str(path)) else f"{path} "
        damaged = DamagedError(
            f"{place}: {subject}is not a checkpoint, or damaged; give the folder of a run of "
            "`counterflow train`, or another checkpoint of it"
        )
        damaged.problem = f"{path} is not the index of a checkpoint, or was changed"
        try:
            record = json.loads(path.read_bytes())
        except OSError as error:
            unreadable = DamagedError(f"{place}: cannot be read: {path}: {error.strerror}")
            unreadable.problem = f"{path} cannot be read: {error.strerror}"
            raise unreadable from None
        except (ValueError, RecursionError):
            raise damaged from None
        if not isinstance(record, dict):
            raise damaged
        data = record.get("checkpoint")
        if not isinstance(data, dict) or record.get("digest") != _digest(data):
            raise damaged
        try:
            index = cls.model_validate(data)
        except ValidationError:
            version = data.get("format_version")
            if data.get("format") == FORMAT and version != VERSION:
                raise ConfigError(
                    f"{place}: is a checkpoint of version {str(version)[:20]}, but this Counterflow reads "
                    f"version {VERSION}; resume with the one that wrote it"
                ) from None
            raise damaged from None
        used = {c.file for t in index.tensors.values() for c in t.chunks} | set(index.objects.values())
        if not used <= index.files.keys():
            raise damaged
        return index


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- folders


def name_of(step: int) -> str:
    """Folder of a step's checkpoint."""
    return f"step-{step}"


def draft_of(step: int, mark: str) -> str:
    """Folder in which workers with this mark write a step's checkpoint."""
    return f".step-{step}.{mark}.draft"


def complete(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, by step."""
    try:
        entries = list(root.iterdir())
    except OSError:
        return []
    folders: dict[int, Path] = {}
    for pattern in (_ASIDE, _FOLDER):  # one that was renamed aside counts if no other has its name
        for entry in entries:
            if (match := pattern.fullmatch(entry.name)) and _has_index(entry):
                folders[int(match[1])] = entry
    return [folders[step] for step in sorted(folders)]


def put_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so it does not count, without removing it."""
    aside = folder.with_name(f"damaged-{folder.name}")
    if aside.exists():
        shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def abandon(folder: Path) -> Path:
    """Rename a checkpoint of a training that a run has gone back behind, so it does not count."""
    numbers = chain([""], (f"{number}-" for number in count(2)))
    names = (folder.with_name(f"abandoned-{number}{folder.name}") for number in numbers)
    return folder.rename(next(name for name in names if not name.exists()))


def remove_drafts(root: Path) -> None:
    """Remove incomplete drafts, after renaming back checkpoints that were renamed aside.

    Only the single writer of the folder may call it, while nobody reads.
    """
    for entry in complete(root):
        if match := _ASIDE.fullmatch(entry.name):
            folder = root / name_of(int(match[1]))
            shutil.rmtree(folder, ignore_errors=True)  # without its index
            rename(entry, folder)
    if root.is_dir():
        for entry in root.iterdir():
            if _DRAFT.fullmatch(entry.name) or (_FOLDER.fullmatch(entry.name) and not _has_index(entry)):
                shutil.rmtree(entry, ignore_errors=True)


def _has_index(entry: Path) -> bool:
    return (entry / INDEX).is_file()
