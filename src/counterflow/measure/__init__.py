"""Measurements on this machine: stages, ops, layers, links and the machine, measured with the runtime.

Results are seconds and bytes, and records for the planner (``profile``, ``cluster``); nothing else of the
planner, and no config, is used here. ``capture.estimates`` estimates costs of layers without running
them.
"""
