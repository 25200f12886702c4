"""The papers: their runs, closed forms, tables and figures, next to the results of planner and simulator.

The planner does not import this room; a paper's numbers never decide a plan.
"""
