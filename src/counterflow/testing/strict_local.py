"""Threads whose messages behave as over the strictest backend: a send waits, and each pair has one order."""

from __future__ import annotations

from counterflow.runtime.transport.spi import Hub

from . import STRICT_LOCAL


class StrictHub(Hub):
    """A ``Hub`` whose sends wait until their receive is posted, and whose pairs must use one order."""

    kind = STRICT_LOCAL
    strict = True
