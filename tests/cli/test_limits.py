"""Numbers beyond all measure are refused in one sentence, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow.schedule.scheme import MOST_OPS

from .conftest import Run

Refused = Callable[..., str]
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "simulate hanayo --workers 1000000 --micro-batches 2",
            "Error: hanayo with --workers 1,000,000 and --micro-batches 2 has at least 4,000,000 ops, but at "
            f"most {MOST_OPS:,} are built; choose smaller numbers\n",
        ),
        ("check dapple --stages 2 --micro-batches 100000000", "Error: dapple with --stages 2 and "),
        ("show pipedream --stages 4 --periods 1000000000", "Error: pipedream with --stages 4 and "),
        (f"export gpipe --stages 4 --micro-batches 1{'0' * 4000}", "Error: gpipe with --stages 4 and "),
        ("verify interleaved --workers 2 --micro-batches 2 --chunks 1000000", "Error: interleaved with "),
        (
            "simulate dapple --stages 2 --micro-batches 2 --forward 1e308",
            "Error: --forward 1e+308: must be 1e+30 seconds or less\n",
        ),
        ("show dapple --stages 2 --micro-batches 2 --p2p 1e308", "Error: --p2p 1e+308: must be 1e+30 "),
        (
            "simulate dapple --stages 2 --micro-batches 2 --weight-bytes 1e308",
            "Error: --weight-bytes 1e308: cannot read '1e308'; give bytes",
        ),
        (
            "plan --example chimera-bert48 --mini-batch 1000000",
            "Error: --mini-batch 1000000: at most 100,000 samples are supported\n",
        ),
        (
            "train --set model.layers=1000000000",
            "Error: --set model.layers = 1000000000: must be a whole number, 1 to 10,000\n",
        ),
        (
            "train --set train.threads=100000",
            "Error: --set train.threads = 100000: must be a whole number, 1 to",
        ),
        (
            f"train --set model.hidden=0x{'f' * 5000}",
            f'Error: --set model.hidden = "0x{"f" * 54}…: must be a whole number, 1 to 1,000,000\n',
        ),
        (
            "train --set train.samples=100000000",
            "Error: train.samples = 100000000: with model.positions = 64 a mini-batch would have ",
        ),
    ],
)
def test_numbers_in_flags(refused: Refused, line: str, message: str) -> None:
    shown = refused(line)
    assert shown.startswith(message)
    assert shown.count("\n") == 1


def test_a_config_of_many_cuts(refused: Refused, tmp_path: Path) -> None:
    """Values are cut before they are written as TOML, which took minutes of these."""
    path = tmp_path / "c.toml"
    path.write_text(f"[pipeline]\ncuts = {list(range(1, 200_001))}\n")
    assert refused(f"train {path}").endswith(
        "pipeline.cuts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1…: 200000 cuts make 200001 "
        "stages, but chimera has 4; give 3 cuts\n"
    )


@pytest.mark.parametrize("line", ["simulate {0} --stages 2", "train --set {0}=1", "check dapple --{0} 2"])
def test_messages_are_short(refused: Refused, line: str) -> None:
    assert len(shown := refused(line.format("x" * 30_000))) < 500
    assert " more) …xxxxx" in shown


def test_messages_of_many_words_are_short(refused: Refused) -> None:
    assert len(shown := refused(f"simulate {'x ' * 15_000!r} --stages 2")) < 1_200
    assert " characters omitted) … " in shown


def test_numbers_that_toml_does_not_have(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[schedule]\nmicro_batches = 0x{'f' * 9000}\n")
    message = "a whole number has more than 64 bits"
    assert refused(f"train {path}").endswith(f"cannot be read as TOML: {message}\n")
    assert message in refused(f"plan --example chimera-bert48 --cluster {path}")


def test_numbers_in_files(run: Run, refused: Refused, tmp_path: Path) -> None:
    run(f"plan --example chimera-bert48 --save-inputs {tmp_path}")
    text = (tmp_path / "cluster.toml").read_text()
    assert "nodes = 32\n" in text
    files = {
        "many.toml": text.replace("nodes = 32\n", "nodes = 1000000000\n"),
        "digits.toml": text.replace("nodes = 32\n", f"nodes = {DIGITS}\n"),
        "digits.json": f'{{"nodes": {DIGITS}}}',
    }
    messages = []
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        messages.append(refused(f"plan --example chimera-bert48 --cluster {tmp_path / name}"))
    schedule = tmp_path / "schedule.json"
    schedule.write_text(f'{{"format": "counterflow-schedule", "micro_batches": {DIGITS}}}')
    messages.append(refused(f"check {schedule}"))
    assert [message.removeprefix(f"Error: {tmp_path}/") for message in messages] == [
        "many.toml: nodes=1000000000 with devices=1 each: at most 100,000 devices are supported; "
        "give fewer\n",
        *(
            f"{name}: a number has thousands of digits; is the file damaged?\n"
            for name in ("digits.toml", "digits.json", "schedule.json")
        ),
    ]
