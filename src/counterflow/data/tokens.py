"""Texts through a tokenizer of transformers: samples of tokens and labels for a language model.

Invariant: as in ``batches``, a sample is a pure function of (seed, step, its index in the mini-batch),
whatever the number of replicas. In each epoch samples come in another order, each once; the last 5 % are kept
for validation. Labels are the token ids themselves (a causal model shifts them), or -100 if a token does not
count. Hidden tokens of masked models, and classes of texts, are in ``targets``.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from counterflow.common.extras import imported
from counterflow.errors import ConfigError

from .text import entropy_of
from .text_batches import IGNORED, in_range, part_of, stream

Inputs = dict[str, torch.Tensor]

_KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
}
"""Format with which ``datasets`` reads a file, by suffix."""

_VALIDATION_SHARE = 20  # one sample in 20
_PERMUTATIONS = 2**32 - 2
"""Stands for a step in the key of an epoch's order."""

_Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Documents:
    """Texts as tokens, one after another.

    Attributes:
        tokens: tokens of all texts.
        starts: beginning of each text; at the end the number of tokens.
        bytes: size of the texts in bytes.
        labels: label of each text in the file; empty if labels were not asked for.
    """

    tokens: npt.NDArray[np.int32]
    starts: _Tokens
    bytes: int
    labels: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self.starts) - 1

    @cached_property
    def digest(self) -> str:
        """Digest of the tokens, the beginnings of texts, and the labels."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.tokens).data, digest_size=16)
        digest.update(np.ascontiguousarray(self.starts).data)
        digest.update(repr(self.labels).encode())
        return digest.hexdigest()

    @cached_property
    def entropy(self) -> float:
        """Loss in nats per token of a model that knows only how frequent each token is."""
        return entropy_of(self.tokens)


_read: dict[tuple[object, ...], Documents] = {}
_reading = threading.Lock()


def read_documents(
    path: Path | str, tokenizer: Any, column: str = "text", label: str | None = None
) -> Documents:
    """The texts of a file or of all files in a folder, each a document that ends with the tokenizer's end
    token.

    A text file is one document, and so is a line of a JSONL file or a row of a parquet or CSV file. Documents
    are cached, by ``datasets`` for other processes and here for other threads.

    Args:
        path: a text, JSON, JSONL, CSV or parquet file, or a folder of them.
        tokenizer: a tokenizer of transformers.
        column: key of a row that contains its text.
        label: key of a row that contains its label; None: no labels.

    Raises:
        ConfigError: the file cannot be read, or contains no text or no labels.
    """
    path = Path(path)
    try:
        files = sorted(p for p in path.rglob("*") if p.suffix in _KINDS) if path.is_dir() else [path]
        special = next((file for file in files if file.exists() and not file.is_file()), None)
        if special is not None:
            raise ConfigError(f"{special}: is no regular file and may have no end; name a file or a folder")
        stats = tuple((str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file or folder") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    key = (stats, fast.to_str() if fast is not None else tokenizer.name_or_path, column, label)
    with _reading:
        if key not in _read:
            _read[key] = _tokenized(path, files, tokenizer, column, label)
        return _read[key]


def _tokenized(
    path: Path, files: Sequence[Path], tokenizer: Any, column: str, label: str | None
) -> Documents:
    datasets = imported("datasets")
    kinds = {_KINDS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        problem = "files of several kinds" if len(kinds) > 1 else "no file that can be read"
        raise ConfigError(f"{path}: has {problem}; give files of one kind, one of {', '.join(_KINDS)}")
    (kind,) = kinds
    options = {"sample_by": "document"} if kind == "text" else {}
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        rows = datasets.load_dataset(kind, data_files=[str(f) for f in files], split="train", **options)
        for wanted, what, key in ((column, "text", "data.field"), (label, "label", "data.label")):
            if wanted is not None and wanted not in rows.column_names:
                raise ConfigError(
                    f"{path}: its rows have no {wanted!r}; name the one with the {what} as {key} "
                    f"({', '.join(rows.column_names)})"
                )
        labels = () if label is None else tuple(rows[label])
        end = tokenizer.eos_token_id
        tokens = rows.map(
            _tokens_of,
            batched=True,
            remove_columns=rows.column_names,
            fn_kwargs={"tokenizer": tokenizer, "column": column, "end": end},
        )
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(f"{path}: cannot be read as {kind}: {reason}") from None
    finally:
        if shown:
            datasets.utils.logging.enable_progress_bar()
    lists = [chunk for chunk in tokens.data.column("tokens").chunks if len(chunk)]
    lengths = np.array([length for chunk in lists for length in chunk.value_lengths().to_pylist()], np.int64)
    flat = [chunk.flatten().to_numpy().astype(np.int32, copy=False) for chunk in lists]
    size = sum(tokens.data.column("bytes").to_pylist())
    if not size:
        raise ConfigError(f"{path}: contains no text; name a file that does")
    joined = flat[0] if len(flat) == 1 else np.concatenate(flat)
    return Documents(joined, np.concatenate([[0], np.cumsum(lengths)]), size, labels)


def _tokens_of(rows: dict[str, Any], tokenizer: Any, column: str, end: int | None) -> dict[str, Any]:
    texts = rows[column]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{column!r} of a row is not a text")
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[
        "input_ids"
    ]
    ended = [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]
    return {"tokens": [np.array(ids, np.int32) for ids in ended], "bytes": [len(t.encode()) for t in texts]}


class _Samples(ABC):
    def __init__(
        self,
        documents: Documents,
        positions: int,
        vocabulary: int,
        *,
        causal: bool = True,
        seed: int = 0,
        name: str = "the text",
    ) -> None:
        """Make samples of documents.

        Args:
            documents: result of ``read_documents``.
            positions: maximum tokens of a sample, 1 or more.
            vocabulary: number of different tokens of the model.
            causal: whether tokens see only earlier tokens.
            seed: seed of the order.
            name: name of the documents in errors.

        Raises:
            ConfigError: there are too few samples.
        """
        self.positions = in_range("positions", positions, 1)
        self.vocabulary = vocabulary
        self._documents, self._causal = documents, causal
        count = self._count()
        if count < 2:
            raise ConfigError(
                f"{name}: {count} sample{'' if count == 1 else 's'}: training and validation need one each; "
                "give more text or fewer positions"
            )
        self.held_back = max(1, count // _VALIDATION_SHARE)
        self.training = count - self.held_back
        self._seed = in_range("seed", seed, 0)
        self._order: tuple[int, _Tokens] = (-1, np.arange(0))

    def batch(
        self, step: int, samples: int, *, replica: int = 0, replicas: int = 1
    ) -> tuple[Inputs, torch.Tensor]:
        """One replica's part of mini-batch ``step``; see ``Batches.batch``."""
        in_range("step", step, 0, _PERMUTATIONS - 1)
        chosen = part_of(samples, replica, replicas)
        first = step * samples * replicas
        return self._read([self._number(first + index) for index in chosen])

    def validation(self, samples: int, *, replica: int = 0, replicas: int = 1) -> tuple[Inputs, torch.Tensor]:
        """Samples evenly spread over the validation part; see ``Batches.validation``."""
        total, chosen = samples * replicas, part_of(samples, replica, replicas)
        return self._read([self.training + number * self.held_back // total for number in chosen])

    @abstractmethod
    def _count(self) -> int:
        pass

    @abstractmethod
    def _read(self, numbers: Sequence[int]) -> tuple[Inputs, torch.Tensor]:
        pass

    def _number(self, index: int) -> int:
        epoch, place = divmod(index, self.training)
        known, order = self._order
        if known != epoch:
            keys = stream(self._seed, _PERMUTATIONS, epoch).random_raw(self.training)
            order = np.argsort(keys, kind="stable")
            self._order = epoch, order
        return int(order[place])


class PackedDocuments(_Samples):
    """Full samples: the documents one after another, cut into pieces of one length.

    Inputs are a dict of ``input_ids`` and, if a sample has parts of several documents, ``position_ids``,
    which restart with each: a document does not see any other. The first token of a document is not a label.
    For a model whose tokens also see later tokens, documents are not separated.
    """

    def _count(self) -> int:
        return len(self._documents.tokens) // self.positions

    @cached_property
    def _has_parts(self) -> bool:
        inside = self._documents.starts[:-1]
        used = inside[inside < self._count() * self.positions]
        return self._causal and bool((used % self.positions).any())

    def _read(self, numbers: Sequence[int]) -> tuple[Inputs, torch.Tensor]:
        length, starts = self.positions, self._documents.starts
        ids = np.empty((len(numbers), length), np.int64)
        places = np.tile(np.arange(length), (len(numbers), 1))
        labels = np.empty_like(ids)
        for row, number in enumerate(numbers):
            first = number * length
            ids[row] = labels[row] = self._documents.tokens[first : first + length]
            if not self._causal:
                continue
            bounds = np.searchsorted(starts, [first, first + length])
            for start in starts[bounds[0] : bounds[1]] - first:
                labels[row, start] = IGNORED
                places[row, start:] = np.arange(length - start)
        inputs = {"input_ids": torch.from_numpy(ids)}
        if self._has_parts:
            inputs["position_ids"] = torch.from_numpy(places)
        return inputs, torch.from_numpy(labels)


class Padded(_Samples):
    """Samples with a document each: its first tokens, and padding up to the longest's length.

    Inputs are a dict of ``input_ids``. Padding is not a label. There is no mask, because padding comes last
    and no token sees it. A model whose tokens also see later tokens gets an ``attention_mask`` and, for a
    text that is cut, also the last token, which closes it.
    """

    def __init__(
        self, documents: Documents, positions: int, vocabulary: int, *, padding: int, **options: Any
    ) -> None:
        """Use documents as samples.

        Args:
            documents: result of ``read_documents``.
            positions: maximum tokens of a sample, 1 or more.
            vocabulary: number of different tokens of the model.
            padding: the token to pad with.
            options: ``causal``, ``seed`` and ``name``, see ``PackedDocuments``.
        """
        longest = int(np.diff(documents.starts).max())
        self._padding = padding
        super().__init__(documents, min(positions, longest), vocabulary, **options)

    def _count(self) -> int:
        return self._documents.count

    def _read(self, numbers: Sequence[int]) -> tuple[Inputs, torch.Tensor]:
        ids = np.full((len(numbers), self.positions), self._padding, np.int64)
        labels = np.full_like(ids, IGNORED)
        starts = self._documents.starts
        for row, number in enumerate(numbers):
            tokens = self._documents.tokens[starts[number] : starts[number + 1]]
            length = min(len(tokens), self.positions)
            ids[row, :length] = tokens[:length]
            if not self._causal:
                ids[row, length - 1] = tokens[-1]
            labels[row, :length] = ids[row, :length]
        inputs = {"input_ids": torch.from_numpy(ids)}
        if not self._causal:
            inputs["attention_mask"] = torch.from_numpy((labels != IGNORED).astype(np.int64))
        return inputs, torch.from_numpy(labels)
