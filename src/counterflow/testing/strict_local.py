"""Threads whose messages go as over the least patient backend: a send waits, and pairs keep one order."""

from __future__ import annotations

from counterflow.runtime.transport.local import Hub

from . import STRICT_LOCAL


class StrictHub(Hub):
    """See ``Hub``: sends wait until their receive is posted, and pairs must keep one order."""

    kind = STRICT_LOCAL
    strict = True
