"""The command ``counterflow``: what people type and read.

``commands`` contains one file per command, which parses, calls one function and prints. ``options`` defines
the flags and their meaning, ``output`` what commands print with.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the work failed, 2 the request was
wrong. Nothing here imports torch, and a command loads only what it needs (no figures or papers' tables for
others).
"""

from .app import application, main

__all__ = ["application", "main"]
