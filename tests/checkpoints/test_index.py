"""The text of ``checkpoint.json``, what of it is refused, and which folders count."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from counterflow.checkpoints.index import (
    INDEX,
    RUN,
    Chunk,
    Index,
    Stored,
    Written,
    complete,
    draft_of,
    name_of,
    put_aside,
    remove_drafts,
)
from counterflow.errors import ConfigError

WHOLE = Index(
    step=3,
    seed=7,
    layout="dapple(2, 4)",
    tensors={
        "model/ä": Stored(
            dtype="float32",
            shape=(2, 3),
            chunks=(Chunk(file="model-0.safetensors", offsets=(0, 0), sizes=(2, 3)),),
        )
    },
    objects={"options/0": "options-0.json"},
    aliases={"ä": ("b",)},
    files={
        "model-0.safetensors": Written(bytes=24, sha256="0" * 64),
        "options-0.json": Written(bytes=2, sha256="1" * 64),
    },
    about={"validation_loss": 0.5},
)
OF_RUN = {"config": "[train]", "optimizer": "adamw", "samples": 4}
DAMAGED = (
    "run: {} is not a checkpoint, or damaged; give the folder of a run of `counterflow train`, or another "
    "checkpoint of it"
)


def digested(data: Any) -> str:
    """The file's text, with the digest that it should have."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": data})


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        Index.load(path, "run")
    return str(error.value)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    path.write_bytes(WHOLE.dumps())
    assert Index.load(path, "run") == WHOLE
    assert WHOLE.has_training
    assert not WHOLE.model_copy(update={"objects": {"extra/0": "extra-0.json"}}).has_training


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"config": "my run: 5", "optimizer": "AdamW", "data": "wiki"}, {}),
        ({RUN: OF_RUN, "config": "my run: 5"}, OF_RUN),
        (OF_RUN | {"validation_loss": 0.5}, OF_RUN | {"validation_loss": 0.5}),  # of earlier runs
        ({RUN: "mine"}, {}),
    ],
)
def test_entries_of_a_run_are_not_those_of_a_program(about: dict[str, Any], expected: dict[str, Any]) -> None:
    assert WHOLE.model_copy(update={"about": about}).run == expected


def test_the_text_is_indented_and_has_its_digest() -> None:
    text = WHOLE.dumps().decode()
    data = WHOLE.model_dump(mode="json")
    assert text == json.dumps(json.loads(digested(data)), indent=1) + "\n"
    assert text.startswith('{\n "digest": "')
    assert data["format"] == "counterflow-checkpoint"
    assert data["tensors"]["model/ä"]["shape"] == [2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "{}",
        '{"checkpoint": []}',
        '{"digest": "", "checkpoint": {}}',
        digested({}),
        digested([]),
        digested({"format": "another", "format_version": 5}),
        digested({**WHOLE.model_dump(mode="json"), "step": -1}),
        digested({**WHOLE.model_dump(mode="json"), "files": {}}),
        digested({**WHOLE.model_dump(mode="json"), "objects": {"options/0": "elsewhere.json"}}),
        WHOLE.dumps().decode().replace('"step": 3', '"step": 4'),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / INDEX
    path.write_text(text)
    assert refusal(path) == DAMAGED.format(path)


def test_another_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    data = {**WHOLE.model_dump(mode="json"), "format_version": "4" * 30}
    path.write_text(digested(data))
    assert refusal(path) == (
        f"run: is a checkpoint of version {'4' * 20}, but this Counterflow reads version 4; resume with "
        "the one that wrote it"
    )


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path / INDEX) == f"run: cannot be read: {tmp_path / INDEX}: No such file or directory"


# -- folders


def made(root: Path, *names: str, index: bool = True) -> None:
    for name in names:
        (root / name / "inner").mkdir(parents=True)
        if index:
            (root / name / INDEX).touch()


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_complete_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    assert complete(tmp_path / "nowhere") == []
    made(
        tmp_path,
        "step-10",
        "step-9",
        ".step-9.old",
        ".step-8.old",
        "damaged-step-7",
        "step-x",
        draft_of(6, "a"),
    )
    made(tmp_path, "step-5", index=False)
    assert [path.name for path in complete(tmp_path)] == [".step-8.old", "step-9", "step-10"]
    assert (name_of(5), draft_of(6, "ab")) == ("step-5", ".step-6.ab.draft")


def test_what_is_half_written_goes_and_what_stepped_aside_comes_back(tmp_path: Path) -> None:
    remove_drafts(tmp_path / "nowhere")
    made(
        tmp_path,
        "step-3",
        ".step-2.old",
        draft_of(4, "0f"),
        ".step-4.draft",
        ".step-3.1a.old",
        "kept",
        ".hidden",
    )
    made(tmp_path, "step-2", "step-1", "also", index=False)
    (tmp_path / "step-2" / "left").touch()
    remove_drafts(tmp_path)
    assert names_in(tmp_path) == [".hidden", "also", "kept", "step-2", "step-3"]
    assert names_in(tmp_path / "step-2") == [INDEX, "inner"]


def test_files_that_cannot_be_removed_are_left(tmp_path: Path) -> None:
    (tmp_path / ".step-4.draft").touch()  # no folder
    made(tmp_path, ".step-3.draft")
    remove_drafts(tmp_path)
    assert names_in(tmp_path) == [".step-4.draft"]


def test_a_damaged_one_steps_aside_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    made(tmp_path, "step-3", "damaged-step-3")
    (tmp_path / "step-3" / "new").touch()
    assert put_aside(tmp_path / "step-3") == tmp_path / "damaged-step-3"
    assert names_in(tmp_path) == ["damaged-step-3"]
    assert names_in(tmp_path / "damaged-step-3") == [INDEX, "inner", "new"]
    assert re.fullmatch(r"damaged-step-\d", names_in(tmp_path)[0])
