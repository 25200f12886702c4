"""Keeping a run whole: one writer at a time, signals, failures, restarts, fewer workers."""
