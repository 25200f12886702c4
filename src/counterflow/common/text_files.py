"""Text of files that a user named, where an error gives the reason, and of streams."""

from __future__ import annotations

from pathlib import Path

from counterflow.errors import ConfigError

_MOST_BYTES = 256 * 2**20
"""Maximum size of a file that is read whole as text; an endless one, like a device, has more."""

_PIECE_BYTES = 2**20


def read_text(path: Path | str, if_folder: str, *, place: str = "", if_missing: str = "") -> str:
    """The text of a file.

    Args:
        path: the file.
        if_folder: the message about a folder, after its place.
        place: what named the file, for errors; default: its path.
        if_missing: end of the message about a missing file.

    Raises:
        ConfigError: the file cannot be read.
    """
    place = place or str(path)
    try:
        text = _limited(Path(path), place).decode("utf-8-sig")  # Windows programs may begin with a mark
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise ConfigError(f"{place}: no such file{if_missing}") from None
    except IsADirectoryError:
        raise ConfigError(f"{place}: {if_folder}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: is not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror}") from None


def _limited(path: Path, place: str) -> bytes:
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            data += piece
            if len(data) > _MOST_BYTES:
                raise ConfigError(
                    f"{place}: has more than {_MOST_BYTES // 2**20} MiB, or has no end; name a smaller file"
                )
    return bytes(data)


def can_encode(encoding: str, text: str) -> bool:
    """True if an encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
