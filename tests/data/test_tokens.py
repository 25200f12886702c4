"""Texts through a tokenizer: what a sample is, and that each is read once an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.data.tokens import Documents, PackedDocuments, Padded, read_documents
from counterflow.errors import ConfigError

from ..models.hf import tiny

TEXTS = [f"document {number} says {'so ' * (number % 5 + 1)}" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer(TEXTS)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


def test_documents_are_the_texts_with_their_ends(lines: Path, tokenizer: Any) -> None:
    documents = read_documents(lines, tokenizer)
    assert documents.count == len(TEXTS)
    assert documents.bytes == sum(map(len, TEXTS))
    parts = [
        documents.tokens[a:b].tolist() for a, b in zip(documents.starts, documents.starts[1:], strict=False)
    ]
    assert all(part[-1] == tokenizer.eos_token_id for part in parts)
    assert [tokenizer.decode(part[:-1]) for part in parts] == TEXTS
    assert 0 < documents.entropy < 5
    assert read_documents(lines, tokenizer) is documents


def test_a_text_file_is_one_document_and_a_folder_many(tmp_path: Path, tokenizer: Any) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("\n".join(TEXTS[:5]))
    assert read_documents(tmp_path / "0.txt", tokenizer).count == 1
    documents = read_documents(tmp_path, tokenizer)
    assert documents.count == 3
    assert tokenizer.decode(documents.tokens[: documents.starts[1] - 1]) == "\n".join(TEXTS[:5])


def rows_of(
    batches: PackedDocuments | Padded, steps: int, samples: int, replicas: int = 1
) -> list[tuple[int, ...]]:
    return [
        tuple(row.tolist())
        for step in range(steps)
        for replica in range(replicas)
        for row in batches.batch(step, samples, replica=replica, replicas=replicas)[0]["input_ids"]
    ]


def test_packed_samples_are_the_documents_one_after_another(lines: Path, tokenizer: Any) -> None:
    documents = read_documents(lines, tokenizer)
    packed = PackedDocuments(documents, 16, 300, seed=1)
    count = len(documents.tokens) // 16
    held_back = max(1, count // 20)
    expected = {tuple(documents.tokens[16 * n : 16 * n + 16].tolist()) for n in range(count)}
    epoch = rows_of(packed, count - held_back, 1)
    assert len(set(epoch)) == count - held_back  # each once
    validation = {tuple(row.tolist()) for row in packed.validation(held_back)[0]["input_ids"]}
    assert set(epoch) | validation == expected
    assert not set(epoch) & validation
    assert rows_of(packed, count - held_back, 1) == epoch
    assert rows_of(packed, 2 * (count - held_back), 1)[count - held_back :] != epoch  # another order
    assert rows_of(packed, 4, 2, replicas=3) == rows_of(packed, 4, 6)


def test_positions_of_packed_samples_begin_anew_with_each_document() -> None:
    documents = Documents(torch.arange(24, dtype=torch.int32).numpy(), _array([0, 3, 8, 16, 21, 24]), 24)
    packed = PackedDocuments(documents, 8, 300)
    inputs, labels = packed.validation(1)
    assert inputs["input_ids"].tolist() == [[16, 17, 18, 19, 20, 21, 22, 23]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert labels.tolist() == [[-100, 17, 18, 19, 20, -100, 22, 23]]
    rows = {tuple(row.tolist()) for step in range(2) for row in packed.batch(step, 1)[0]["position_ids"]}
    assert rows == {(0, 1, 2, 0, 1, 2, 3, 4), tuple(range(8))}
    aligned = PackedDocuments(Documents(documents.tokens, _array([0, 8, 24]), 24), 8, 300)
    assert "position_ids" not in aligned.batch(0, 2)[0]


def test_padded_samples_are_a_document_each() -> None:
    documents = Documents(torch.arange(1, 13, dtype=torch.int32).numpy(), _array([0, 3, 8, 10, 12]), 12)
    padded = Padded(documents, 4, 300, padding=99)
    assert padded.positions == 4
    inputs, labels = padded.batch(0, 3)
    assert sorted(inputs["input_ids"].tolist()) == [[1, 2, 3, 99], [4, 5, 6, 7], [9, 10, 99, 99]]
    assert torch.equal(labels, torch.where(inputs["input_ids"] == 99, -100, inputs["input_ids"]))
    assert padded.validation(1)[0]["input_ids"].tolist() == [[11, 12, 99, 99]]
    assert Padded(documents, 64, 300, padding=99).positions == 5


def _array(numbers: list[int]) -> Any:
    return torch.tensor(numbers).numpy()


def test_what_cannot_be_read_is_refused(tmp_path: Path, lines: Path, tokenizer: Any) -> None:
    for path, content, message in (
        ("none.jsonl", None, "no such file"),
        ("text.pdf", "x", "no file that can be read"),
        ("empty.txt", "", "contains no text"),
        ("odd.jsonl", '{"text": 1}\n', "cannot be read as json"),
        ("broken.jsonl", '{"text": \n', "cannot be read as json"),
        ("other.jsonl", '{"body": "a"}\n', r"data.field \(body\)"),
    ):
        if content is not None:
            (tmp_path / path).write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_documents(tmp_path / path, tokenizer)
    with pytest.raises(ConfigError, match="files of several kinds"):
        read_documents(tmp_path, tokenizer)
    documents = read_documents(lines, tokenizer)
    with pytest.raises(ConfigError, match="1 sample: training and validation need one each"):
        PackedDocuments(documents, len(documents.tokens), 300)
