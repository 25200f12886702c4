"""Files that a user named, read or refused with the reason."""

from __future__ import annotations

from pathlib import Path

from counterflow.errors import ConfigError


def read_text(path: Path | str, if_folder: str) -> str:
    """The text of a file.

    Args:
        path: where it is.
        if_folder: what to say of a folder, after its path.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: {if_folder}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
