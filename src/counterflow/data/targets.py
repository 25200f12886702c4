"""Targets of transformers models other than the next token: hidden tokens, or a text's class.

Invariant: as in ``batches``, a sample is a pure function of (seed, step, its index in the mini-batch),
whatever the number of replicas or workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from counterflow.errors import ConfigError

from .text_batches import IGNORED, VALIDATION_STEP, hide, part_of, stream
from .tokens import Documents, Inputs, PackedDocuments, Padded


class Masked:
    """Samples with some tokens hidden, which are predicted from all others.

    15 % of a sample's tokens that are neither special nor padding are chosen, at least one. 80 % of those
    become the tokenizer's mask token, 10 % any token, 10 % are unchanged. Labels are the true tokens if
    chosen, otherwise -100. Whenever a sample is read again other tokens are chosen.

    Source: Devlin et al. 2019 (BERT), section 3.1, without the next-sentence task.
    """

    def __init__(self, samples: PackedDocuments | Padded, tokenizer: Any, *, seed: int = 0) -> None:
        """Hide tokens of samples.

        Args:
            samples: samples made with ``causal=False``.
            tokenizer: a tokenizer of transformers.
            seed: seed of the choice of tokens.

        Raises:
            ConfigError: the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ConfigError(
                "the tokenizer has no mask token, which a masked language model needs; add one with "
                'tokenizer.add_special_tokens({"mask_token": "[MASK]"}) and save it'
            )
        self.positions, self.vocabulary = samples.positions, samples.vocabulary
        self._samples = samples
        self._mask: int = tokenizer.mask_token_id
        self._special = np.array(sorted(tokenizer.all_special_ids))
        self._tokens = len(tokenizer)
        self._seed = seed

    def batch(
        self, step: int, samples: int, *, replica: int = 0, replicas: int = 1
    ) -> tuple[Inputs, torch.Tensor]:
        """One replica's part of mini-batch ``step``; see ``Batches.batch``."""
        mini_batch = self._samples.batch(step, samples, replica=replica, replicas=replicas)
        streams = [stream(self._seed, step, sample) for sample in part_of(samples, replica, replicas)]
        return self._masked(*mini_batch, streams)

    def validation(self, samples: int, *, replica: int = 0, replicas: int = 1) -> tuple[Inputs, torch.Tensor]:
        """Samples of the validation part, always masked in the same way; see ``Batches.validation``."""
        samples_read = self._samples.validation(samples, replica=replica, replicas=replicas)
        streams = [stream(0, VALIDATION_STEP, sample) for sample in part_of(samples, replica, replicas)]
        return self._masked(*samples_read, streams)

    def _masked(
        self, inputs: Inputs, labels: torch.Tensor, streams: Sequence[np.random.PCG64]
    ) -> tuple[Inputs, torch.Tensor]:
        ids = inputs["input_ids"].numpy()
        may = (labels.numpy() != IGNORED) & ~np.isin(ids, self._special)
        targets = np.full_like(ids, IGNORED)
        for row, drawn in enumerate(streams):
            hide(ids[row], targets[row], may[row].nonzero()[0], drawn, mask=self._mask, tokens=self._tokens)
        return inputs, torch.from_numpy(targets)


class Labelled(Padded):
    """Samples with a document each, whose targets are the documents' labels."""

    def __init__(
        self,
        documents: Documents,
        positions: int,
        vocabulary: int,
        labels: npt.NDArray[np.int64],
        **options: Any,
    ) -> None:
        """Use documents as samples.

        Args:
            documents: result of ``read_documents``.
            positions: maximum tokens of a sample, 1 or more.
            vocabulary: number of different tokens of the model.
            labels: labels of the documents.
            options: see ``Padded``.
        """
        super().__init__(documents, positions, vocabulary, causal=False, **options)
        self._labels = labels

    def _read(self, numbers: Sequence[int]) -> tuple[Inputs, torch.Tensor]:
        inputs, _ = super()._read(numbers)
        return inputs, torch.from_numpy(self._labels[list(numbers)])


def numbered(documents: Documents, names: Mapping[str, int], classes: int) -> npt.NDArray[np.int64]:
    """The labels of documents as numbers of classes.

    Args:
        documents: documents that were read with their labels.
        names: names of classes, and their numbers.
        classes: number of classes.

    Raises:
        ConfigError: a label is not a class.

    >>> found = Documents(np.zeros(2, np.int32), np.array([0, 1, 2]), 2, ("bad", 1))
    >>> numbered(found, {"bad": 0, "good": 1}, 2)
    array([0, 1])
    """
    numbers: list[Any] = [
        names.get(label, label) if isinstance(label, str) else label for label in documents.labels
    ]
    for number, label in zip(numbers, documents.labels, strict=True):
        if type(number) not in (int, bool) or not 0 <= number < classes:
            raise ConfigError(
                f"the label {label!r} of a text is not one of the model's {classes} classes; give numbers "
                "from "
                f"0 to {classes - 1}, or their names in the model's config ({', '.join(map(repr, names))})"
            )
    return np.array(numbers, np.int64)
