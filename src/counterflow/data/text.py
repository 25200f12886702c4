"""Texts as bytes: the one that ships with Python, a file, or a folder of files.

Invariant: the same source gives the same bytes, whatever the machine or the order of its directories.
Nothing is decoded and nothing is downloaded: a token is a byte.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from counterflow.errors import ConfigError

BYTE_VALUES = 256
"""Vocabulary of a byte-level language model."""


@functools.cache
def shipped_text() -> bytes:
    """The text that ships with Python: the help topics of ``pydoc``, sorted by their names.

    Topics quote each other. Only the first occurrence of a paragraph is kept, because otherwise a third of
    the text's end would also occur earlier and say nothing about what a model learnt. About 370 kB of English
    with code remain; they differ slightly between versions of Python.

    Raises:
        ConfigError: this Python does not contain the text.

    >>> len(shipped_text()) > 300_000
    True
    """
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  (some builds of Python leave it out)
    except ImportError:
        raise ConfigError(
            "this Python ships without pydoc_data.topics, the built-in text; name a text in data.path"
        ) from None
    paragraphs = (part for name in sorted(topics) for part in topics[name].strip().split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def read_text(path: Path | str) -> bytes:
    """The bytes of a text file, or of all text files in a folder.

    A folder is read with all its subfolders, its files in the order of their paths, joined by a newline.
    Files that contain a NUL byte are binary and skipped, and so is everything whose name starts with a dot.

    Raises:
        ConfigError: the file or folder does not exist, cannot be read, is binary, or contains no text.
    """
    path = Path(path)
    if path.is_dir():
        texts = [data for file in _visible_files(path) if (data := _bytes(file)) and not _binary(data)]
        if not texts:
            raise ConfigError(f"{path}: this folder contains no text file; name one that does")
        return b"\n".join(texts)
    data = _bytes(path)
    if not data:
        raise ConfigError(f"{path}: the file is empty; name one that contains text")
    if _binary(data):
        raise ConfigError(
            f"{path}: is not a text file (byte {data.index(0)} is NUL); name a text file, or a folder of them"
        )
    return data


def unigram_entropy(data: bytes) -> float:
    """Entropy of single bytes, in nats per byte: the loss of a model that knows only how frequent each is.

    Raises:
        ConfigError: the text is empty.

    >>> unigram_entropy(b"abab") == math.log(2)
    True
    """
    if not data:
        raise ConfigError("an empty text has no entropy; give at least 1 byte")
    return entropy_of(np.frombuffer(data, np.uint8))


def entropy_of(numbers: npt.NDArray[Any]) -> float:
    """Entropy in nats of a number that is drawn from these, which are 0 or more.

    >>> entropy_of(np.array([5, 5, 7, 7])) == math.log(2)
    True
    """
    counts = np.bincount(numbers)
    shares = counts[counts > 0] / counts.sum()
    return math.fsum(-shares * np.log(shares))


def _visible_files(folder: Path) -> list[Path]:
    paths: list[Path] = []

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(place, name) for name in names if not name.startswith(".")]
        paths += [file for file in files if file.is_file()]
    return sorted(paths, key=lambda file: file.relative_to(folder).as_posix())


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{path}: is no regular file and may have no end; name a text file, or a folder"
            )
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:  # the path contains a NUL
        raise ConfigError(f"{str(path)!r}: is not a path: {error}") from None


def _binary(data: bytes) -> bool:
    return b"\0" in data
