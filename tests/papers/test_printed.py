"""Schedules whose numbers the papers print, or that are proved here (tables.toml), simulated."""

from __future__ import annotations

from typing import Any

import pytest

from counterflow import Costs
from counterflow.schedule import registry
from counterflow.schedule.residency import peak_activations
from counterflow.simulation import simulate

from .reading import PRINTED, longest_span


def costs_of(row: dict[str, Any]) -> Costs:
    if "times" not in row:
        return Costs()
    forward, inputs, weights = row["times"]
    return Costs(forward, inputs + weights, input_gradient=inputs, weight_gradients=weights)


@pytest.mark.parametrize(
    "row", PRINTED["simulated"], ids=lambda row: f"{row['source']}: {row['scheme']} {row['options']}"
)
def test_simulated_numbers(row: dict[str, Any]) -> None:
    schedule, costs = registry.scheme(row["scheme"]).schedule(row["options"]), costs_of(row)
    simulated = {
        "makespan": simulate(schedule, costs).makespan,
        "peak": max(peak_activations(schedule)),
        "span": longest_span(schedule, costs),
    }
    names = simulated.keys() & row.keys()
    assert names
    assert {name: simulated[name] for name in names} == {name: row[name] for name in names}
