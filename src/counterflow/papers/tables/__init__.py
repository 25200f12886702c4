"""The tables that ``counterflow reproduce`` knows, a file a paper: each value beside a measured one."""

from __future__ import annotations

from collections.abc import Callable

from .chimera import chimera_table2
from .layout import Table
from .mixpipe import mixpipe_table1
from .wpipe import wpipe_table1
from .zero_bubble import zb_table5

TABLES: dict[str, Callable[[], Table]] = {
    "chimera-table2": chimera_table2,
    "mixpipe-table1": mixpipe_table1,
    "wpipe-table1": wpipe_table1,
    "zb-table5": zb_table5,
}
"""What ``counterflow reproduce`` knows, by name."""

__all__ = ["TABLES"]
