"""A file of a checkpoint: written piece by piece with its digest, and synced to the disk when the call
returns.

Safetensors files are written here instead of by their library. Its ``save``, which torch's
``HuggingFaceStorageWriter`` uses, needs two more copies of all tensors in memory; its ``save_file`` neither
returns the digest nor raises an ``OSError`` if the disk is full.

Invariant: digests are computed from the data in memory, so any change by the disk is detected.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterflow.errors import ConfigError

from .index import Written

_PIECE_BYTES = 16 * 1024 * 1024

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Names of dtypes in safetensors files."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """Safetensors' name of the dtype of a tensor.

    Raises:
        ConfigError: the format does not support the dtype.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise ConfigError(f"{key} is {dtype}, which safetensors files do not support; use another dtype")
    return name


def write_tensors(
    path: Path,
    sizes: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> Written:
    """Write a safetensors file of tensors that are read one after another.

    Args:
        path: path of the file.
        sizes: by name: the format's name of the dtype, and the shape.
        read: function of a name that returns the tensor on the CPU.
        offsets: by name, where a piece begins in the whole tensor; the file's header contains it as
            torch.distributed.checkpoint reads it. None: the tensors are whole.

    Raises:
        OSError: the file cannot be written.
    """
    about = {"format": "pt"}
    if offsets is not None:
        begins = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
        about |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(begins)}
    return write(path, pieces_of(sizes, read, about))


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The format's name of each tensor's dtype, and its shape, by the tensor's name.

    Raises:
        ConfigError: the format does not support a dtype.
    """
    return {name: (dtype_name(tensor.dtype, name), tuple(tensor.shape)) for name, tensor in tensors.items()}


def pieces_of(
    sizes: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], Tensor], about: Mapping[str, str]
) -> Iterator[memoryview]:
    """The contents of a safetensors file: the length of its header, the header, and each tensor.

    Args:
        sizes: by name: the format's name of the dtype, and the shape.
        read: function of a name that returns the tensor on the CPU.
        about: metadata for the header.
    """
    header: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, (dtype, shape) in sizes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in sizes:
        tensor = read(name).resolve_conj().resolve_neg()
        if tensor.numel():
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(path: Path, pieces: Iterable[memoryview | bytes]) -> Written:
    """Write a file, and wait until it is on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    digest, total = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            for start in range(0, len(piece), _PIECE_BYTES):
                part = piece[start : start + _PIECE_BYTES]
                digest.update(part)
                file.write(part)
            total += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Written(bytes=total, sha256=digest.hexdigest())


def packed(value: object) -> bytes:
    """A value as bytes that torch reads, if that needs no code execution."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def unpacked(data: bytes | memoryview) -> Any:
    """The value of such bytes, its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def settle(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def problem_of(path: Path, written: Written, *, contents: bool) -> str:
    """Problem of a file; empty if there is none.

    Args:
        path: path of the file.
        written: expected length and digest.
        contents: whether to compare the contents as well as the length.
    """
    try:
        if path.stat().st_size != written.bytes:
            return f"{path.name} has {path.stat().st_size:,} bytes and was written with {written.bytes:,}"
        if contents:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != written.sha256:
                    return f"{path.name} was changed after it was written (its digest differs)"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return ""
