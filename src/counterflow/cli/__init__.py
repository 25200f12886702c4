"""The command ``counterflow``: one file a command; each parses, calls one function and prints.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the work failed, 2 the request was
wrong. Nothing here imports torch, and what a command does not need (figures, tables of papers) is not
loaded by it.
"""

from .app import application, main

__all__ = ["application", "main"]
