"""Tokens hidden from masked models: the same for all workers, and as much as it should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from counterflow.data.targets import Masked
from counterflow.data.tokens import Documents, PackedDocuments, Padded
from counterflow.errors import ConfigError


class Tokenizer:
    """Of 50 tokens; 0 to 3 are special, and 3 is the mask."""

    mask_token_id: int | None = 3
    all_special_ids = (0, 1, 2, 3)

    def __len__(self) -> int:
        return 50


def documents() -> Documents:
    """Twenty of 2 to 21 tokens, with a special one at each end."""
    rng = np.random.default_rng(0)
    texts = [[1, *rng.integers(4, 50, n).tolist(), 2] for n in range(20)]
    starts = np.cumsum([0, *map(len, texts)])
    return Documents(np.array([token for row in texts for token in row], np.int32), starts, 100)


def masked(kind: Any, **options: Any) -> Masked:
    return Masked(kind(documents(), 12, 50, causal=False, seed=1, **options), Tokenizer(), seed=1)


def test_what_is_hidden_is_told_by_the_labels() -> None:
    """A token is chosen, or is as it was; none that is special is."""
    samples = masked(Padded, padding=0)
    unmasked = Padded(documents(), 12, 50, padding=0, causal=False, seed=1)
    hidden = unchanged = chosen = 0
    for step in range(40):
        inputs, labels = samples.batch(step, 4)
        before, _ = unmasked.batch(step, 4)
        assert torch.equal(inputs["attention_mask"], before["attention_mask"])
        true, ids = before["input_ids"], inputs["input_ids"]
        labelled = labels != -100
        assert torch.equal(true[labelled], labels[labelled])
        assert torch.equal(true[~labelled], ids[~labelled])
        assert (true[labelled] > 3).all()
        assert labelled.sum(1).tolist() == [round(0.15 * n) or int(n > 0) for n in (true > 3).sum(1).tolist()]
        hidden += int((ids[labelled] == 3).sum())
        unchanged += int((ids[labelled] == true[labelled]).sum())
        chosen += int(labelled.sum())
    assert 0.7 < hidden / chosen < 0.9
    assert 0.04 < unchanged / chosen < 0.2


def test_samples_do_not_depend_on_replicas_or_on_what_was_read_before() -> None:
    samples = masked(PackedDocuments)
    inputs, labels = samples.batch(3, 6)
    repeated = masked(PackedDocuments)
    parts = [repeated.batch(3, 2, replica=replica, replicas=3) for replica in (2, 0, 1)]
    parts = [parts[1], parts[2], parts[0]]
    assert torch.equal(torch.cat([part["input_ids"] for part, _ in parts]), inputs["input_ids"])
    assert torch.equal(torch.cat([part for _, part in parts]), labels)
    assert set(inputs) == {"input_ids"}
    assert torch.equal(samples.validation(1)[1], masked(PackedDocuments).validation(1)[1])


def test_a_text_that_is_cut_keeps_its_end() -> None:
    padded = Padded(documents(), 6, 50, padding=0, causal=False)
    for step in range(19):
        inputs, _ = padded.batch(step, 1)
        ids = inputs["input_ids"][0][inputs["attention_mask"][0] == 1]
        assert ids[[0, -1]].tolist() == [1, 2]
        assert (ids == 2).sum() == 1


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    tokenizer = Tokenizer()
    tokenizer.mask_token_id = None
    with pytest.raises(ConfigError, match="has no mask token"):
        Masked(PackedDocuments(documents(), 12, 50, causal=False), tokenizer)
