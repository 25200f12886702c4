"""The papers: their runs, closed forms, tables and figures, beside what the planner and the simulator say.

The planner knows nothing of this room; what a paper says never decides a plan.
"""
