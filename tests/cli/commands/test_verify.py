"""``counterflow verify``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..conftest import Run

LOW = [
    ("autocast", "zb-v --stages 4 --micro-batches 4", 1e-5),
    ("compute-dtype", "chimera --stages 2 --micro-batches 2", 1e-5),
    ("compute-dtype", "dapple --stages 1 --micro-batches 2", 1e-5),
    ("compute-dtype", "pipedream --stages 2", 1e-5),
    ("autocast", "chimera --stages 2 --micro-batches 4 --concat backward-halving", 1e-5),
]


@pytest.mark.parametrize("scheme", ["dapple --stages 2", "chimera --stages 2"])
def test_steps_without_a_barrier_agree(run: Run, scheme: str) -> None:
    result = run(f"verify {scheme} --micro-batches 2 --no-barrier --json").json
    assert result["ok"]
    assert result["weight_error"] < 1e-10


@pytest.mark.parametrize(("how", "scheme", "tolerance"), LOW)
def test_it_compares_with_one_process_in_the_same_precision(
    run: Run, how: str, scheme: str, tolerance: float
) -> None:
    for lower in ("bfloat16",) if "pipedream" in scheme else ("bfloat16", "float16"):
        result = run(f"verify {scheme} --{lower} {how} --json").json
        assert result["ok"]
        assert result["tolerance"] == tolerance


def test_full_precision_is_another_one(refused: Callable[..., str]) -> None:
    assert "--bfloat16 and --float16: layers compute in one precision; give one of them" in refused(
        "verify dapple --stages 2 --micro-batches 2 --bfloat16 autocast --float16 autocast"
    )
    assert "leave out --dtype float64" in refused(
        "verify dapple --stages 2 --micro-batches 2 --bfloat16 autocast --dtype float64"
    )


def test_compressed_sums_are_compared_in_float32(run: Run, refused: Callable[[str], str]) -> None:
    line = "verify dapple --stages 2 --micro-batches 2 --replicas 2 --gradient-compression"
    answer = run(f"{line} bfloat16")
    assert answer.code == 0
    assert "4 workers against one process, float32" in answer.out
    assert "They agree: all errors are within 0.05." in answer.out
    assert "summed in full; leave out --dtype float64" in refused(f"{line} int8 --dtype float64")
