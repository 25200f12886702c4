"""``counterflow verify``."""

from __future__ import annotations

import pytest

from ..conftest import Run


@pytest.mark.parametrize("scheme", ["dapple --stages 2", "chimera --stages 2"])
def test_steps_without_a_barrier_agree(run: Run, scheme: str) -> None:
    found = run(f"verify {scheme} --micro-batches 2 --no-barrier --json").json
    assert found["ok"]
    assert found["weight_error"] < 1e-10
