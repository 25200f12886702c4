"""OR-tools' CP-SAT, for the models of blocks (``blocks``) and of whole orders (``exact``).

Here is what both need: a choice between two, what runs one at a time, and a solver that Ctrl-C ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from counterflow.extras import imported


def solver_is_there() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def cp_model() -> Any:
    """OR-tools' module of models.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    return imported("ortools.sat.python.cp_model", "synthesize")


def either(model: Any, literal: Any, yes: Any, no: Any) -> None:
    """One of two holds, as a literal or a constant says."""
    if isinstance(literal, int):
        model.add(yes if literal else no)
    else:
        model.add(yes).only_enforce_if(literal)
        model.add(no).only_enforce_if(~literal)


def one_at_a_time(model: Any, spans: Iterable[tuple[Any, int]]) -> None:
    """What starts then and lasts so long does not overlap."""
    model.add_no_overlap([model.new_fixed_size_interval_var(start, lasts, "") for start, lasts in spans])


def answered(
    model: Any, *, seconds: float, threads: int, seed: int = 0, effort: float | None = None, told: Any = None
) -> tuple[Any, str]:
    """A solver that has looked at a model, and its status.

    It works in a thread beside the main one, which Ctrl-C reaches.

    Args:
        model: the model.
        seconds: at most so long.
        threads: of the search.
        seed: of the search.
        effort: at most so much of the solver's own, deterministic time.
        told: of each solution, a callback of OR-tools'.
    """
    solver = cp_model().CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31
    if effort is not None:
        solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C from Python for good
    with ThreadPoolExecutor(1) as beside:
        solving = beside.submit(solver.solve, model, told)
        try:
            return solver, solver.status_name(solving.result())
        except KeyboardInterrupt:
            solver.stop_search()
            raise
