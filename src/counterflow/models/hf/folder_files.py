"""Files of a model's weights in a folder, found as transformers finds them.

Invariant: every tensor that an index names is in a file.
"""

from __future__ import annotations

import json
from pathlib import Path

from counterflow.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def has_weights(folder: Path) -> bool:
    """True if a folder contains a model's weights in safetensors files."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def files_by_tensor(folder: Path) -> dict[str, str]:
    """The file of each tensor in a folder, by its name in the files.

    Raises:
        ConfigError: the folder has no such files, they cannot be read, or some of the weights are missing.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    # transformers leaves the index of an earlier, sharded model beside a single file, and reads the file.
    single = (folder / SINGLE).is_file()
    if not single and not (folder / INDEX).is_file():
        raise ConfigError(
            f"{folder}: contains no {SINGLE} and no {INDEX}; save the model with save_pretrained, or "
            "build it from its config for fresh weights"
        )
    index = {} if single else _read_index(folder)
    files: dict[str, str] = {}
    for name in [SINGLE] if single else sorted(set(index.values())):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {INDEX} names {name}, which does not exist; save the model again")
        try:
            with safe_open(folder / name, "pt") as file:
                files |= dict.fromkeys(file.keys(), name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder / name}: cannot be read as safetensors: {str(error)[:200]}") from None
    if missing := sorted(index.keys() - files.keys()):
        raise ConfigError(
            f"{folder}: {INDEX} names the tensor {missing[0]}, which no file contains; save the model again"
        )
    return files


def _read_index(folder: Path) -> dict[str, str]:
    try:
        files = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{folder / INDEX}: is damaged; save the model again") from None
