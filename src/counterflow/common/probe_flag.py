"""Flag of runs that check how a mini-batch is cut, and whose results do not count.

Captured layers then accept sizes that differ though they are the same in their example: to find that they are
the same by coincidence is what the check is for.
"""

from __future__ import annotations

from contextvars import ContextVar

PROBING: ContextVar[bool] = ContextVar("counterflow_probing", default=False)
