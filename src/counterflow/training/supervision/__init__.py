"""Supervision of a run: a single writer, signals, failures, restarts, fewer workers."""
