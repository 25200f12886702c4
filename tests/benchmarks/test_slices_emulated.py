"""The layers of ``benchmarks/slices_emulated.py`` cost what its predictions take them to cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import counterflow as cf

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    """``slices_emulated.py``, and ``emulated_device.py`` with a device that counts and does not sleep."""
    names = "emulated_device", "kit", "slices_emulated"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        device = import_module("emulated_device")

        class Idle(device.Device):  # type: ignore[misc,name-defined]
            def compute(self, begin: float, seconds: float, ready: float = 0.0) -> float:
                del ready
                self.asked_seconds += seconds
                return begin

        patch.setattr(device, "DEVICE", Idle())
        yield import_module("slices_emulated"), device
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("scheme", "slices", "attention"),
    [("dapple", 1, 0.5), ("dapple", 4, 0.0), ("dapple", 4, 0.5), ("zb_h1", (512, 256, 256), 0.5)],
)
def test_a_step_asks_for_what_is_predicted(
    scripts: tuple[Any, Any], scheme: str, slices: Any, attention: float
) -> None:
    script, device = scripts
    schedule = getattr(cf.schemes, scheme)(1, micro_batches=2, slices=slices)

    def asked() -> float:
        pipeline = cf.Pipeline(
            [device.First(), script.Layer(1.0, attention)],
            device.trivial_loss,
            schedule,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            witness_every=0,
        )
        batch = torch.zeros(2, script.POSITIONS, 1), torch.zeros(2, script.POSITIONS)
        for _ in range(2):  # they also compare slices with the whole
            pipeline.step(*batch)
        before: float = device.DEVICE.asked_seconds
        pipeline.step(*batch)
        found: float = device.DEVICE.asked_seconds - before
        return found

    (found,) = cf.launch(asked, workers=1, transport="local")
    predicted = script.predicted(schedule, 0.0, attention=attention)
    assert found == pytest.approx(predicted.makespan)


def test_lengths_of_equal_times(scripts: tuple[Any, Any]) -> None:
    script, _ = scripts
    build: Any = cf.schemes.dapple
    schedule = build(1, micro_batches=1, slices=script.equal_times(4))
    found = script.predicted(schedule, 0.0, attention=script.GROWS)
    forwards = (found.end - found.start)[:4].tolist()
    assert forwards == pytest.approx([forwards[0]] * 4, rel=0.01)


def test_torchs_orders_say_what_they_save(scripts: tuple[Any, Any]) -> None:
    """As its 1F1B: the first of four ranks saves four forwards."""
    _, device = scripts
    kind = device.Kind

    def acts(*kinds: Any) -> list[Any]:
        action = device.theirs.schedules._Action
        return [action(0, each, 0) for each in kinds]

    order = acts(kind.FORWARD, kind.FORWARD, kind.BACKWARD_INPUT, kind.FORWARD, kind.BACKWARD_WEIGHT)
    assert device.their_peak(device.flattened({0: [*order, None]})) == 3
