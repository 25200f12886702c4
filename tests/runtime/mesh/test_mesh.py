"""Stages whose weights are sharded: FSDP2 and tensor parallelism on further dimensions of the mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import counterflow as cf

from ...kit import FileFunction


@pytest.mark.parametrize("processes", ["four", "eight"])
def test_sharded_stages_give_the_numbers_of_one_process(processes: str) -> None:
    """All cases in the same processes: it is their start that takes long."""
    cf.launch(cases_of(processes), workers={"four": 4, "eight": 8}[processes], timeout_seconds=60, threads=1)


def test_fsdp_sums_gradients_once_a_step() -> None:
    cf.launch(cases_of("four", "fsdp_sum.py"), workers=4, timeout_seconds=60, threads=1)


def test_fsdp_sums_what_some_positions_used() -> None:
    cf.launch(cases_of("four", "unequal_cases.py"), workers=4, timeout_seconds=60, threads=1)


def test_layers_that_were_found_are_divided_with_the_weights_of_the_model() -> None:
    cf.launch(cases_of("two", "recorded_cases.py"), workers=2, timeout_seconds=60, threads=1)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("within_at_once", r"stage 0 gathers \d\.\w+ here, and another position does not or gathers others"),
        ("within_later", "stage 0 gathers weights in another order at another position"),
        ("each_backward", "stage 0 sums other gradients of .* here .* omit sums_each_backward"),
        ("each_backward_of_replicas", "stage 0 sums other gradients of"),
        ("each_backward_later", "stage 0 gathers weights in another order at another position"),
    ],
)
def test_modules_that_fsdp_gathers_at_some_positions_are_refused(case: str, words: str) -> None:
    workers = 4 if case.endswith("replicas") else 2
    with pytest.raises(cf.ConfigError, match=words):
        cf.launch(cases_of(case, "unequal_cases.py"), workers=workers, timeout_seconds=30, threads=1)


@pytest.mark.parametrize("processes", ["refused", "accepted"])
def test_optimizers_update_shards_as_whole_weights_or_are_refused(processes: str) -> None:
    cf.launch(cases_of(processes, "optimizer_cases.py"), workers=2, timeout_seconds=60, threads=1)


def test_experts_give_the_numbers_of_one_process() -> None:
    cf.launch(cases_of("four", "expert_cases.py"), workers=4, timeout_seconds=60, threads=1)


def test_degrees_of_a_mesh_give_the_numbers_of_one_process() -> None:
    """And its ranks agree on the table of weights that ``train --dry-run`` prints without them."""
    tables = cf.launch(cases_of("four", "tensor_cases.py"), workers=4, timeout_seconds=60, threads=1)
    assert tables == [cases_of("rehearsed", "tensor_cases.py")()] * 4


@pytest.mark.parametrize(
    ("file", "case", "words"),
    [
        ("tensor", "fixed_heads", r"stage 0: 1: the forward of Fixed computes something else of its part"),
        (
            "tensor",
            "norm_of_parts",
            r"stage 0: 1: the forward of Normalised computes something else of its part",
        ),
        (
            "tensor",
            "view_of_nothing",
            r"layer 1 .* \(on no rows, .*: give each position at least one .*reshape",
        ),
        ("compared", "expert_bias", "stage 0: the forward of Biased looks up something by the number of an"),
        ("compared", "expert_factors", "stage 0: the forward of Scaled looks up something by the number"),
    ],
)
def test_what_positions_compute_otherwise_is_refused(file: str, case: str, words: str) -> None:
    with pytest.raises(cf.CounterflowError, match=words):
        cf.launch(cases_of(case, f"{file}_cases.py"), workers=2, timeout_seconds=60, threads=1)


def test_what_positions_compute_alike_runs_without_a_warning() -> None:
    assert cf.launch(cases_of("right", "compared_cases.py"), workers=2, timeout_seconds=60, threads=1) == [
        [],
        [],
    ]


@pytest.mark.parametrize("processes", ["four", "sliced", "eight"])
def test_shared_sequences_give_the_numbers_of_one_process(processes: str) -> None:
    """With eight processes experts are divided as well, beside shared sequences or tensor parallelism."""
    workers = {"four": 4, "sliced": 4, "eight": 8}[processes]
    cf.launch(cases_of(processes, "context_cases.py"), workers=workers, timeout_seconds=60, threads=1)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mixing", r"layer 1 \(Mixing\) of stage 0 computes something else of a share of a sequence"),
        *[
            (case, r"layer \d \(\w+\) of stage \d computes something else of a share of a sequence")
            for case in ("gated", "gated_sliced", "counting", "looking_back", "normalising", "skipping")
        ],
        ("recurrent", "a layer carries a state along the sequence"),
        ("mixing_sliced", r"layer 1 \(Mixing\) of stage 0 computes something else of a share"),
        ("recurrent_sliced", "a layer carries a state along the sequence"),
        ("shifting_shared", "the loss is no mean over positions: that of the 8 of a share"),
        ("shifting_sliced", "the loss is no mean over positions: that of 4 of a slice"),
        ("preference_shared", "the loss is no mean over positions: that of the 8 of a share"),
        ("padded_later", "the loss is no mean over positions: that of the 8 of a share"),
        ("padded_later_sliced", "the loss is no mean over positions: that of 4 of a slice"),
        ("shapes_differ", "ranks 0 and 1 share sequences, and were given mini-batches of other shapes"),
        ("micro_batches_differ", "ranks 0 and 1 share sequences, and were given mini-batches of other"),
        ("samples_differ", r"ranks \d and \d share sequences, and their inputs are shares of different ones"),
        ("unshared", r"all positions .* are given the same inputs, .* give cf.share_sequence"),
    ],
)
def test_what_shared_sequences_cannot_have_is_refused(case: str, words: str) -> None:
    with pytest.raises(cf.ConfigError, match=words):
        cf.launch(cases_of(case, "context_cases.py"), workers=4, timeout_seconds=60, threads=1)


def cases_of(name: str, file: str = "cases.py") -> FileFunction:
    """A function of cases.py, or of another file here."""
    return FileFunction(Path(__file__).with_name(file), name)


def test_without_further_dimensions_there_is_nothing_to_shard() -> None:
    with pytest.raises(cf.ConfigError, match="parallelize needs further dimensions of the mesh"):
        cf.launch(_pipeline, workers=1, transport="local")


def _pipeline() -> None:
    schedule = cf.schemes.dapple(1, 2)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    cf.Pipeline(
        [nn.Linear(2, 2)], None, schedule, optimizer=optimizer, parallelize=lambda _stage, _mesh: None
    )


def test_ranks_of_replicas_in_place_of_a_device_mesh() -> None:
    found = cf.launch(_trained, ((2, 0), (3, 1)), workers=4, transport="local")
    usual = cf.launch(_trained, None, workers=4, transport="local")
    assert [place for place, _ in found] == [(0, 1), (1, 1), (0, 0), (1, 0)]
    assert [place for place, _ in usual] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {loss for _, loss in found} == {loss for _, loss in usual}
    with pytest.raises(
        cf.ConfigError, match=r"mesh = \(\(0, 1\), \(1, 2\)\): give each replica as many ranks"
    ):
        cf.launch(_trained, ((0, 1), (1, 2)), workers=4, transport="local")


def _trained(mesh: Any) -> tuple[tuple[int, int], float]:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in range(2)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    pipeline = cf.Pipeline(layers, nn.MSELoss(), cf.schemes.dapple(2, 2), optimizer=optimizer, mesh=mesh)
    mine = torch.arange(8.0).view(4, 2) + pipeline.replica
    return (pipeline.replica, pipeline.worker), [pipeline.step(mine, mine).loss for _ in range(2)][1]
