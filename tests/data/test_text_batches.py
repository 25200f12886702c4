"""Mini-batches: literal cases, and what must not depend on replicas, workers or the number of samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow import ConfigError
from counterflow.data.text_batches import IGNORED, MASK, MaskedByte, NextByte, Tensors, TextBatches

TEXT = bytes(range(200)) * 10  # a byte tells where it stands, but for the round

few = settings(max_examples=25, deadline=None)


def next_byte(positions: int = 8, seed: int = 0) -> TextBatches:
    return NextByte(TEXT, positions, seed=seed)


def masked_byte(positions: int = 8, seed: int = 0) -> TextBatches:
    return MaskedByte(TEXT, positions, seed=seed)


KINDS = pytest.mark.parametrize("make", [next_byte, masked_byte])


def tensors(inputs: Tensors, targets: torch.Tensor) -> list[torch.Tensor]:
    return [*(inputs if isinstance(inputs, tuple) else (inputs,)), targets]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def values(*read: torch.Tensor) -> set[int]:
    return {value for tensor in read for value in tensor.flatten().tolist()}


def joined(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# --- Both kinds -----------------------------------------------------------------------------------------


@KINDS
@few
@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 10**9),
    samples=st.integers(1, 6),
    replicas=st.integers(1, 4),
)
def test_the_mini_batch_does_not_depend_on_the_replicas_it_is_spread_over(
    make: Any, seed: int, step: int, samples: int, replicas: int
) -> None:
    batches: TextBatches = make(seed=seed)
    mini_batch = tensors(*batches.batch(step, samples * replicas))
    parts = [tensors(*batches.batch(step, samples, replica=r, replicas=replicas)) for r in range(replicas)]
    assert equal(joined(parts), mini_batch)
    fixed = [tensors(*batches.validation(samples, replica=r, replicas=replicas)) for r in range(replicas)]
    assert equal(joined(fixed), tensors(*batches.validation(samples * replicas)))


@KINDS
def test_the_same_on_every_worker_and_different_by_seed_step_sample_and_replica(make: Any) -> None:
    first = tensors(*make().batch(5, 4, replica=1, replicas=2))
    assert equal(first, tensors(*make().batch(5, 4, replica=1, replicas=2)))
    for different in (
        make(seed=1).batch(5, 4, replica=1, replicas=2),
        make().batch(6, 4, replica=1, replicas=2),
        make().batch(5, 4, replica=0, replicas=2),
    ):
        assert not equal(first, tensors(*different))
    assert len({tuple(row.tolist()) for row in first[0]}) == 4


@KINDS
def test_shapes_types_and_range(make: Any) -> None:
    batches: TextBatches = make(positions=5)
    assert batches.positions == 5
    for batch in (batches.batch(0, 3), batches.validation(3)):
        for tensor in tensors(*batch):
            assert (tensor.shape, tensor.dtype) == ((3, 5), torch.int64)
            assert tensor.is_contiguous()
            assert int(tensor.max()) < batches.vocabulary


@KINDS
def test_validation_is_the_same_for_every_seed(make: Any) -> None:
    assert equal(tensors(*make(seed=0).validation(4)), tensors(*make(seed=7).validation(4)))


@KINDS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1, "samples": 1}, r"step=-1: must be 0 to"),
        ({"step": 0, "samples": 0}, r"samples=0: must be 1 to"),
        ({"step": 0, "samples": 1, "replica": 2, "replicas": 2}, r"replica=2: must be 0 to 1"),
        ({"step": 0, "samples": 1, "replicas": 0}, r"replicas=0: must be 1 to"),
    ],
)
def test_numbers_out_of_range(make: Any, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().batch(**arguments)


@pytest.mark.parametrize("kind", [NextByte, MaskedByte])
def test_a_kind_refuses_a_bad_seed_no_positions_and_a_short_text(kind: Any) -> None:
    with pytest.raises(ConfigError, match="seed=-1: must be 0 to 4294967295"):
        kind(TEXT, 8, seed=-1)
    with pytest.raises(ConfigError, match="positions=0: must be 1 to"):
        kind(TEXT, 0)
    with pytest.raises(ConfigError, match=r"a\.txt: 3 bytes are too short: .* \d+ or more; give a longer"):
        kind(b"abc", 8, name="a.txt")


# --- The next byte --------------------------------------------------------------------------------------


def test_the_shortest_text_has_one_window_for_training_and_one_for_validation() -> None:
    batches = NextByte(b"abcdef", 2)
    for seed in range(3):
        inputs, targets = NextByte(b"abcdef", 2, seed=seed).batch(9, 2)
        assert inputs.tolist() == [[*b"ab"]] * 2
        assert targets.tolist() == [[*b"bc"]] * 2
    inputs, targets = batches.validation(1)
    assert (inputs.tolist(), targets.tolist()) == ([[*b"de"]], [[*b"ef"]])
    with pytest.raises(ConfigError, match=r"5 bytes are too short: .* so 6 or more"):
        NextByte(b"abcde", 2)


def test_literal_windows() -> None:
    """The draws are numpy's raw bits, fixed for ever: another result here is another training run."""
    inputs, targets = NextByte(TEXT, 3, seed=1).batch(2, 3)
    assert inputs[:, 0].tolist() == [42, 151, 83]
    assert torch.equal(targets, (inputs + 1) % 200)
    (tokens, _), targets = MaskedByte(TEXT, 6, seed=1).batch(2, 2)
    assert tokens.tolist() == [[127, 128, 129, 130, 190, 132], [25, 26, 27, 28, MASK, 30]]
    assert targets[:, 4].tolist() == [131, 29]


def test_training_never_reads_the_validation_part() -> None:
    text = b"a" * 950 + b"b" * 50
    inputs, targets = NextByte(text, 4).batch(0, 2000)
    assert values(inputs, targets) == {ord("a")}
    inputs, targets = NextByte(text, 4).validation(60)
    assert values(inputs, targets) == {ord("b")}


def test_every_training_window_can_come() -> None:
    text = bytes(range(40))
    inputs, _ = NextByte(text, 3).batch(0, 1000)
    assert sorted(set(inputs[:, 0].tolist())) == list(range(36 - 3))


def test_validation_windows_are_spread_evenly() -> None:
    inputs, _ = NextByte(bytes(200) * 19 + bytes(range(200)), 8).validation(6)
    assert inputs[:, 0].tolist() == [0, 32, 64, 96, 128, 160]


# --- Masked bytes ---------------------------------------------------------------------------------------


@few
@given(positions=st.integers(1, 40), seed=st.integers(0, 99), step=st.integers(0, 99))
def test_as_many_targets_in_every_sample_and_only_those_are_changed(
    positions: int, seed: int, step: int
) -> None:
    (tokens, segments), targets = MaskedByte(TEXT, positions, seed=seed).batch(step, 4)
    chosen = targets != IGNORED
    assert chosen.sum(dim=1).tolist() == [max(1, round(0.15 * positions))] * 4
    true = torch.where(chosen, targets, tokens)
    for row in true.tolist():  # one window of the text
        assert all(after == (before + 1) % 200 for before, after in pairwise(row))
    assert not segments.any()
    assert not (tokens[~chosen] == MASK).any()


def test_eight_tenths_masked_one_replaced_one_kept() -> None:
    (tokens, _), targets = MaskedByte(TEXT, 100).batch(0, 400)
    chosen = targets != IGNORED
    hidden = tokens[chosen]
    masked = (hidden == MASK).float().mean().item()
    unchanged = (hidden == targets[chosen]).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert unchanged == pytest.approx(0.1, abs=0.02)
    assert int(hidden.max()) == MASK
    assert len(values(hidden)) > 200  # replaced by any byte


def test_positions_are_chosen_evenly() -> None:
    _, targets = MaskedByte(TEXT, 10).batch(0, 3000)
    shares = (targets != IGNORED).float().mean(dim=0)
    assert shares.tolist() == pytest.approx([0.2] * 10, abs=0.03)


def test_the_vocabularies() -> None:
    assert (next_byte().vocabulary, masked_byte().vocabulary, MASK) == (256, 257, 256)
