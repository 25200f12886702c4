"""OR-tools' CP-SAT, for the models of blocks (``blocks``) and of whole orders (``exact``).

It contains what both need: a choice between two, exclusive intervals, and a solver that Ctrl-C ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from counterflow.common.extras import imported


def solver_is_there() -> bool:
    """Check whether OR-tools is installed."""
    return find_spec("ortools") is not None


def cp_model() -> Any:
    """OR-tools' module of models.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    return imported("ortools.sat.python.cp_model", "synthesize")


def either(model: Any, literal: Any, yes: Any, no: Any) -> None:
    """Require one of two constraints, chosen by a literal or a constant."""
    if isinstance(literal, int):
        model.add(yes if literal else no)
    else:
        model.add(yes).only_enforce_if(literal)
        model.add(no).only_enforce_if(~literal)


def one_at_a_time(model: Any, spans: Iterable[tuple[Any, int]]) -> None:
    """Require that intervals given by start and length do not overlap."""
    model.add_no_overlap([model.new_fixed_size_interval_var(start, lasts, "") for start, lasts in spans])


def answered(
    model: Any,
    *,
    seconds: float,
    threads: int,
    seed: int = 0,
    effort: float | None = None,
    callback: Any = None,
) -> tuple[Any, str]:
    """A solver that has processed a model, and its status.

    It runs in a second thread, so Ctrl-C reaches the main one.

    Args:
        model: the model.
        seconds: time limit.
        threads: number of threads of the search.
        seed: seed of the search.
        effort: maximum of the solver's own, deterministic time.
        callback: OR-tools callback for each solution.
    """
    solver = cp_model().CpSolver()
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31
    if effort is not None:
        solver.parameters.max_deterministic_time = effort
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C from Python for good
    with ThreadPoolExecutor(1) as executor:
        solving = executor.submit(solver.solve, model, callback)
        try:
            return solver, solver.status_name(solving.result())
        except KeyboardInterrupt:
            solver.stop_search()
            raise
