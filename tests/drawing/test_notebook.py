"""Display of objects in notebooks: right, escaped, and without anything from outside."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import counterflow as cf
from counterflow.planning import Configuration, predict
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.planning.task import load_example
from counterflow.program.checker import inspect

EVIL = "<script>alert(1)</script>--><img src=x onerror=y>\"'&$x^2$"


def safe(html: str) -> None:
    """Refuse what could run, what comes from elsewhere, and a text that was not escaped."""
    assert "<script" not in html
    assert "<img" not in html
    loaded = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert all(target.startswith("#") for target in loaded)
    ET.fromstring(html)  # well-formed: no text ends an element


def shown(subject: Any) -> str:
    html = subject._repr_html_() if hasattr(subject, "_repr_html_") else subject._repr_svg_()
    assert isinstance(html, str)
    safe(html)
    return html


@pytest.mark.parametrize("name", ["dapple", EVIL])
def test_a_schedule_is_drawn(name: str) -> None:
    html = shown(replace(cf.schemes.dapple(2, 3), scheme=name))
    assert html.count("<title>F") + html.count("<title>forward") >= 6
    assert html.count("<svg") == 1


def test_a_wrong_schedule_shows_what_is_wrong_and_its_orders() -> None:
    right = cf.schemes.dapple(2, 2)
    wrong = replace(right, orders=(right.orders[0][:-1], right.orders[1]), scheme=EVIL)
    html = shown(wrong)
    assert "is wrong" in html
    assert "<svg" not in html
    assert "<td>worker 1</td><td>F0.1 B0.1 F1.1 B1.1</td>" in html


def test_a_large_schedule_shows_the_begin_of_its_orders() -> None:
    html = shown(cf.schemes.gpipe(2, 2000))
    assert "<svg" not in html
    assert "3,940 more" in html
    assert len(html) < 10_000
    assert cf.simulate(cf.schemes.gpipe(2, 2000))._repr_svg_() is None


def test_a_simulation_is_drawn_with_its_memory() -> None:
    schedule = replace(cf.schemes.chimera(2, 2), scheme=EVIL)
    costs = cf.Costs(memory=cf.ByteCosts(activations=2.0**20))
    plain, with_memory = (shown(cf.simulate(schedule, costs_)) for costs_ in (None, costs))
    assert "MiB" in with_memory
    assert len(plain) < len(with_memory)


def test_a_check_shows_every_rule() -> None:
    right = cf.schemes.dapple(2, 2)
    assert shown(inspect(right)).count("✓") == len(inspect(right).results)
    wrong = inspect(replace(right, orders=right.orders[:1] * 2))
    html = shown(wrong)
    assert html.startswith("<div><p><b>Wrong</b>")
    assert "✗" in html


def test_a_computed_order_shows_its_bound() -> None:
    synthesis = cf.synthesize(cf.schemes.dapple(2, 2).workload, moves=0)
    html = shown(synthesis)
    assert "<td>no order below</td><td>9</td>" in html
    assert "<svg" in html


def test_plans_are_tables() -> None:
    task = load_example("chimera-bert48")
    chimera = Configuration.of("chimera", {"stages": 4, "micro_batches": 8}, replicas=8, samples=8)
    prediction = predict(task.model, task.profile, task.cluster, chimera)
    html = shown(replace(prediction, schedule=EVIL, notes=(EVIL,)))
    assert (
        "<td>chimera</td><td>4</td><td>8</td><td>1</td><td>8</td><td>8</td><td>none</td><td>eager-opt</td>"
        in html
    )
    result = search(
        *(task.model, task.profile, task.cluster, task.mini_batch),
        Constraints(schemes=("chimera", "dapple"), depths=(4,)),
    )
    assert shown(result).count("<tr>") == 1 + 2
