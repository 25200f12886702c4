"""Cache of the last few schedules as prepared for timing."""

from __future__ import annotations

from threading import Lock

from counterflow.schedule.ir import Schedule

from .timed_schedule import TimedSchedule

KEPT_MODELS = 8
"""Number of models cached, so trying many costs on a few schedules builds each model once."""

_models: list[TimedSchedule] = []
_models_lock = Lock()
"""Held while that list is read or changed, because threads may simulate at the same time."""


def timed(schedule: Schedule) -> TimedSchedule:
    """The schedule's model; those of the last few schedules are cached."""
    with _models_lock:
        for place, model in enumerate(_models):
            if model.schedule is schedule:
                _models.append(_models.pop(place))
                return model
    model = TimedSchedule(schedule)
    with _models_lock:
        _models.append(model)
        del _models[:-KEPT_MODELS]
    return model
