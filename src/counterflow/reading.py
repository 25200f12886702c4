"""Files that a user named, read or refused with the reason."""

from __future__ import annotations

from pathlib import Path

from counterflow.errors import ConfigError


def read_text(path: Path | str, if_folder: str, *, place: str = "", if_missing: str = "") -> str:
    """The text of a file.

    Args:
        path: where it is.
        if_folder: what to say of a folder, after its place.
        place: who named it, for errors; its path where not given.
        if_missing: what to say more of a file that is not there.

    Raises:
        ConfigError: it cannot be read.
    """
    place = place or str(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{place}: there is no such file{if_missing}") from None
    except IsADirectoryError:
        raise ConfigError(f"{place}: {if_folder}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is no text (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror}") from None
