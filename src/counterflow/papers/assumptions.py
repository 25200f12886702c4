"""Assumptions of the papers' formulas, each with what a schedule or its costs are instead."""

from __future__ import annotations

from collections.abc import Callable

from .formula_subject import Subject

CLOSE = 1e-9
"""Relative difference of two times that are taken to be equal."""

Need = Callable[[Subject], str | None]
"""Function that returns what is not met, with what there is instead; None if it is met."""


def equal_stages(subject: Subject) -> str | None:
    """Stages take equally long."""
    for name, seconds in (("forwards", subject.forwards), ("backwards", subject.backwards)):
        least, most = min(seconds), max(seconds)
        if most - least > CLOSE * most:
            return f"stages take equally long; here {name} take {least:g} to {most:g}"
    return None


def _ratio(low: float, high: float, text: str) -> Need:
    def need(subject: Subject) -> str | None:
        ratio = subject.times.backward / subject.times.forward if subject.times.forward else 0.0
        if low - CLOSE <= ratio <= high + CLOSE:
            return None
        return f"a backward takes {text} a forward; here {ratio:g} times as long"

    return need


double_backward = _ratio(2.0, 2.0, "twice as long as")
equal_slots = _ratio(1.0, 1.0, "as long as")
long_backward = _ratio(1.0, float("inf"), "as long as, or longer than,")


def free_messages(subject: Subject) -> str | None:
    """Messages take no time."""
    message = subject.times.message
    return f"messages take no time; here up to {message:g}" if message else None


def free_sums(subject: Subject) -> str | None:
    """Sums of gradients take no time."""
    sums = subject.times.allreduce
    most = max(sums) if isinstance(sums, tuple) else sums
    return f"gradients are summed in no time; here in up to {most:g}" if most else None


def whole_backwards(subject: Subject) -> str | None:
    """Backwards and micro-batches are undivided."""
    if any(op.kind.rest is not None for op in subject.schedule.ops()):
        return "backwards are whole; here some are split"
    if subject.schedule.workload.slices > 1:
        return f"micro-batches are whole; here each is cut into {subject.schedule.workload.slices} slices"
    return None


def no_other_costs(subject: Subject) -> str | None:
    """Stages, messages and all-reduces alone take time."""
    costs = subject.result.costs
    names = [
        *(["the agreement"] if costs.agreement else []),
        *(["the sum of tied weights"] if costs.ties else []),
        *(["ops, which all-reduces slow down,"] if costs.sync_slowdown and free_sums(subject) else []),
        *(["messages, which stop compute,"] if not costs.overlap and subject.times.message else []),
    ]
    return (
        f"only stages, messages and all-reduces take time; here {' and '.join(names)} too" if names else None
    )


def one_unit(subject: Subject) -> str | None:
    """There are as many micro-batches as workers."""
    return None if subject.n == subject.depth else f"N = D; here N = {subject.n} and D = {subject.depth}"


def enough_micro_batches(subject: Subject) -> str | None:
    """There are no fewer micro-batches than workers."""
    return None if subject.n >= subject.depth else f"N ≥ D; here N = {subject.n} and D = {subject.depth}"


def enough_periods(subject: Subject) -> str | None:
    """There are updates enough for every worker to hold its most."""
    least, periods = 2 * subject.depth - 2, subject.schedule.periods
    return None if periods >= least else f"there are 2D − 2 = {least} updates or more; here {periods}"


def two_periods(subject: Subject) -> str | None:
    """There are two updates or more."""
    return "there are two updates or more; here one" if subject.schedule.periods < 2 else None


def many_micro_batches(subject: Subject) -> str | None:
    """There are many micro-batches; never met, as no number is enough."""
    return f"N is large; here {subject.n}"


def symmetric_order(subject: Subject) -> str | None:
    """Both directions have the same order."""
    asymmetric = subject.options.get("asymmetric")
    return "both directions do the same; here the order is asymmetric" if asymmetric else None
