"""Pictures as files: format by suffix, matplotlib's settings, and errors of writing.

Invariant: the same picture gives the same file. matplotlib is imported when a picture is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.errors import ConfigError

from . import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = (".png", ".svg", ".pdf")
"""Suffixes of a figure's file."""

CHARTS = (*FORMS, ".html", ".trace.json")
"""Suffixes of files that a chart can be drawn into."""

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "counterflow",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": ["DejaVu Sans"],
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "path.simplify": False,
    "legend.frameon": False,
    "text.parse_math": False,  # text is data: a dollar sign in a measured run's name begins no formula
}
"""Settings of matplotlib for every figure."""

UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}
"""Metadata by format, without entries that differ from one writing to the next."""


def require_form(path: Path, forms: Iterable[str] = FORMS) -> str:
    """The suffix of a picture's file.

    Raises:
        ConfigError: the suffix is not in ``forms``, or the folder does not exist.
    """
    form = next((form for form in forms if path.name.lower().endswith(form)), None)
    if form is None:
        raise ConfigError(
            f"{path}: cannot tell what to draw from this name; legal endings: {', '.join(forms)}"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it first")
    return form


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Write a file within this context; errors of writing become ``ConfigError``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def sized(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a while to import

    return Figure(figsize=(width, height), dpi=160, facecolor=palette.BACKGROUND)


def saved(path: str | Path, make: Callable[[], Figure]) -> None:
    """Write a figure into a file; an existing one is replaced.

    Args:
        path: the file; its suffix, ``.png``, ``.svg`` or ``.pdf``, is the format.
        make: function that makes the figure, under ``SETTINGS``.

    Raises:
        ConfigError: the suffix is unknown, the folder does not exist, or the file cannot be written.
    """
    path = Path(path)
    form = require_form(path).removeprefix(".")
    import matplotlib as mpl  # noqa: PLC0415 - takes a while to import

    with mpl.rc_context(SETTINGS), written(path):
        make().savefig(path, format=form, metadata=UNDATED[form])
