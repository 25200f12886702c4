"""Schedules: which ops run, where, in which order. Pure data: no torch, no clock, no input or output."""
