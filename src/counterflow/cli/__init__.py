"""The command ``counterflow``: what people type, and what they read.

``commands`` has one file a command: it parses, calls one function and prints. ``options`` are the flags and
what they mean, ``output`` is what commands print with.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the work failed, 2 the request was
wrong. Nothing here imports torch, and what a command does not need (figures, tables of papers) is not
loaded by it.
"""

from .app import application, main

__all__ = ["application", "main"]
