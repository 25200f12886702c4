"""The best order for a workload and costs, with a bound."""

from __future__ import annotations

from .bounds import Bound, lower_bound
from .compute import synthesize
from .problem import Limit, Objective, Problem, problem_of
from .result import Synthesis

__all__ = ["Bound", "Limit", "Objective", "Problem", "Synthesis", "lower_bound", "problem_of", "synthesize"]
