"""A progress bar on stderr for searches of plans or orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def search_bar(doing: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, on a terminal only; it is called with the number done, the total, and the
    current activity.
    """
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from .screen import Screen

    err = Screen(stderr=True, highlight=False)
    if not err.is_terminal:
        yield lambda _done, _of, _what: None
        return
    columns = (
        TextColumn(doing),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[what]}"), console=err, transient=True) as bar:
        task = bar.add_task("", total=None, what="")
        yield lambda done, of, what: bar.update(task, completed=done, total=of, what=what)


@contextmanager
def order_bar(seconds: float | None) -> Iterator[Callable[[float, float, str], None] | None]:
    """A progress bar on stderr, on a terminal only; it is called with the best value, the bound, and the
    current activity.

    Args:
        seconds: expected duration of the search; None: unknown.
    """
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .screen import Screen

    err = Screen(stderr=True, highlight=False)
    if not err.is_terminal:
        yield None
        return
    columns = (TextColumn("ordering"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=seconds, what="")

        def report(best: float, bound: float, doing: str) -> None:
            passed = bar.tasks[0].elapsed or 0.0
            done = passed if seconds is None else min(passed, seconds)
            what = f"best {best:,.6g} · bound {bound:,.6g} · {escape(doing)}"
            bar.update(task, completed=done, what=what)

        yield report
