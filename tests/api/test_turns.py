"""Turns of two functions: who runs when, with which random draws, and what becomes of errors."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from counterflow.api.turns import Turns, has_turns, next_turn


class _Python:
    """Python's generator."""

    states = staticmethod(random.getstate)
    restore = staticmethod(random.setstate)


def _run(first: Callable[[], None], second: Callable[[], None], begins: int = 0) -> None:
    with ThreadPoolExecutor(1) as thread:
        Turns(first, second, _Python()).run(thread, begins)


@pytest.mark.parametrize(("begins", "order"), [(0, "a1 b1 a2 b2 b3 b4"), (1, "b1 a1 b2 a2 b3 b4")])
def test_functions_take_turns_until_one_has_ended(begins: int, order: str) -> None:
    seen: list[str] = []

    def side(name: str, parts: int) -> Callable[[], None]:
        def run() -> None:
            for part in range(1, parts + 1):
                seen.append(f"{name}{part}")
                if part < parts:
                    next_turn()

        return run

    _run(side("a", 2), side("b", 4), begins)
    assert " ".join(seen) == order


def test_the_first_function_runs_in_the_calling_thread() -> None:
    threads: list[Any] = [None, None]

    def note(side: int) -> Callable[[], None]:
        def run() -> None:
            threads[side] = threading.current_thread()

        return run

    _run(note(0), note(1), begins=1)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


def test_each_function_draws_as_if_it_were_alone() -> None:
    def draws(seed: int) -> tuple[list[float], Callable[[], None]]:
        numbers: list[float] = []

        def run() -> None:
            random.seed(seed)
            for _ in range(3):
                numbers.append(random.random())
                next_turn()

        return numbers, run

    alone, run = draws(1)
    run()
    first, run_first = draws(1)
    second, run_second = draws(2)
    _run(run_first, run_second)
    assert first == alone
    assert second != alone


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_both_functions(failing: int) -> None:
    ended: list[int] = []

    def side(number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                next_turn()
                if number == failing:
                    raise ArithmeticError(f"side {number}")
                next_turn()
                next_turn()
            finally:
                ended.append(number)

        return run

    with pytest.raises(ArithmeticError, match=f"side {failing}"):
        _run(side(0), side(1))
    assert sorted(ended) == [0, 1]
    assert not has_turns()


def test_a_function_that_has_not_begun_does_not_begin_after_an_error() -> None:
    def fail() -> None:
        raise ArithmeticError("at once")

    begun: list[int] = []
    with pytest.raises(ArithmeticError, match="at once"):
        _run(fail, lambda: begun.append(1))
    assert not begun


def test_alone_there_are_no_turns() -> None:
    assert not has_turns()
    next_turn()
