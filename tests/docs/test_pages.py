"""The pages in docs/ say what is so: their programs run."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import counterflow as cf
from counterflow.cli import application
from counterflow.models.gpt import GPTConfig
from counterflow.planning import Model
from counterflow.planning.compared import Compared
from counterflow.planning.inputs import input_files
from counterflow.planning.search.constraints import Constraints
from counterflow.planning.search.search import search
from counterflow.runtime.parameters.optimizers import Parameters
from counterflow.runtime.stages.skip_links import links_of, stage_skips
from counterflow.runtime.workers.launch import launch
from counterflow.schedule import formats, registry
from counterflow.schedule.ir import OpKind, Schedule
from counterflow.schedule.orders.mixpipe_asymmetric import ASYMMETRIC
from counterflow.simulation.model_share import CostsOf, of_stages

from ..cli.conftest import Run, run
from ..forked import launching

__all__ = ["run"]

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def test_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, right, look = blocks("ten-minutes.md", "python")
    (tmp_path / "own.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own", None)  # other pages have such a file too
    work = importlib.import_module("own").work
    runs = blocks("ten-minutes.md", "console")[0].splitlines()
    for command, printed in zip(runs[::2], runs[1::2], strict=True):
        scheme = command.split('"')[1]
        losses, evaluated = launch(work, scheme, workers=2, transport="local", timeout_seconds=60)[0]
        said = f"{scheme}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, evaluated {evaluated:.4f}"
        assert said == printed
    exec(right, {})
    exec(look, {})
    same, agreement, *rows = capsys.readouterr().out.splitlines()
    assert same.startswith("SameModel: the same (")
    assert re.fullmatch(r"Agreement: they agree \(loss .*; within 1e-10\)", agreement)
    assert rows == blocks("ten-minutes.md", "text")[1].splitlines()
    assert (tmp_path / "zb-v.png").is_file()
    assert (tmp_path / "saved").is_dir()


def test_mixpipe_orders(run: Run) -> None:
    """The tables are what the benchmark printed, all of it proved; the picture is what the command prints."""
    text = (DOCS / "reference" / "mixpipe-orders.md").read_text(encoding="utf-8")
    kept = DOCS.parent / "benchmarks" / "results" / "mixpipe_asymmetric.txt"
    lines = kept.read_text(encoding="utf-8").splitlines()[2:]
    assert {line.split()[6] for line in lines} == {"proved"}
    assert text.count("\n| ") == 2 + len(lines)
    bold = re.findall(r"^\| (\d+) \| (\d+) \|.*\*\*.*$", text, re.MULTILINE)
    assert [(int(depth), int(peak)) for depth, peak in bold] == [*ASYMMETRIC]
    page = (DOCS / "mixpipe-orders.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in text.splitlines() if "**" in line] == [
        line for line in page if line.endswith("** |")
    ]
    command, *printed = blocks("mixpipe-orders.md", "console")[0].splitlines()
    assert run(command.removeprefix("$ counterflow ")).out.splitlines() == printed


def test_train_your_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, _, same, _, named, between, samples, average, skips, _, meta, options = blocks(
        "train-your-own-model.md", "python"
    )
    script = tmp_path / "train.py"
    assert "stages=4" in program
    script.write_text(program.replace("stages=4", "stages=2").replace("workers=4", "workers=2"))
    launching(script)
    printed = capsys.readouterr().out
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", printed)
    assert found, printed
    assert float(found[2]) < 0.9 * float(found[1])
    exec(same, {})
    compared = capsys.readouterr().out.splitlines()
    assert compared[0].startswith("SameModel: the same (")
    assert compared[1].startswith("layer 3 (Linear): 'head' has another input than in the model (by ")
    assert compared[1].endswith("before it calls 'head' (what 'second' of layer 2 returns is the same)")
    (text,) = launch(_generated, samples, workers=1, transport="local", timeout_seconds=60)
    assert text.shape == (2, 3 + 100)
    (first, other) = launch(_trains, between, workers=2, transport="local", timeout_seconds=60)
    assert 0 < first["loss"] == other["loss"]
    averaged = launch(_trains, average, workers=2, transport="local", timeout_seconds=60)
    assert averaged[0]["loss"] == averaged[1]["loss"]
    assert len(averaged[0]["state"]) == 4
    (made,) = launch(_with_options, options, workers=1, transport="local", timeout_seconds=60)
    assert (made.recompute, made.clip_norm, made.barrier) == ("layer", 1.0, False)
    scope: dict[str, object] = {}
    exec(f"import torch\nfrom torch import nn\n{meta}", scope)
    assert len(scope["layers"]) == 64  # type: ignore[arg-type]
    exec(f"import torch\n{named}", scope)
    chosen = scope["optimizer"](Parameters(torch.nn.Linear(2, 2).named_parameters()))  # type: ignore[operator]
    assert [group["weight_decay"] for group in chosen.param_groups] == [0.0, 0.01]
    unet: dict[str, Any] = {}
    exec(f"import torch\nfrom torch import nn\nimport counterflow as cf\n{skips}", unet)
    assert torch.nn.Sequential(*unet["layers"])(torch.ones(2, 1, 8, 8)).shape == (2, 1, 8, 8)
    assert len(links_of(stage_skips(unet["layers"], range(6)))) == 2


def test_layers_that_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = next(block for block in blocks("train-your-own-model.md", "python") if "# found.py" in block)
    (tmp_path / "found.py").write_text(program)
    monkeypatch.setattr(cf, "launch", on_threads)
    runpy.run_path(str(tmp_path / "found.py"), run_name="__main__")
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", capsys.readouterr().out)
    assert found
    assert float(found[2]) < 0.9 * float(found[1])


def _generated(block: str) -> torch.Tensor:
    config = GPTConfig(vocabulary=60, positions=128, hidden=8, heads=2, layers=1)
    pipeline = cf.Pipeline(
        config.build(), config.loss, "gpipe(stages=1, micro_batches=1)", optimizer=torch.optim.SGD
    )
    scope: dict[str, Any] = {"pipeline": pipeline, "prompt": torch.ones(2, 3, dtype=torch.int64)}
    exec(block, scope)
    found: torch.Tensor = scope["text"]
    return found


def _trains(program: str) -> dict[str, Any]:
    """What is left of a page's program for a pipeline."""
    batches = [(torch.ones(4, 2) * number, torch.ones(4, 2)) for number in range(3)]
    with cf.Pipeline(
        [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)],
        torch.nn.MSELoss(),
        cf.schemes.dapple(2, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) as pipeline:
        names = ("batches", "validation", "the_next_hundred")
        scope: dict[str, Any] = {"pipeline": pipeline, **dict.fromkeys(names, batches)}
        exec(program, scope)
    return scope


def _with_options(program: str) -> cf.Execution:
    """How the pipeline of a page's program executes."""
    scope: dict[str, Any] = {"layers": [torch.nn.Linear(2, 2)], "schedule": cf.schemes.gpipe(1, 2)}
    exec(f"import torch\nfrom torch import nn\nimport counterflow as cf\n{program}", scope)
    found: cf.Execution = scope["pipeline"].execution
    return found


SCHEDULES: dict[str, Schedule] = {
    "gpipe": cf.schemes.gpipe(4, 8),
    "1F1B (dapple)": cf.schemes.dapple(4, 8),
    "interleaved, 2 chunks": cf.schemes.interleaved(4, 8, chunks=2),
    "gems": cf.schemes.gems(4, 8),
    "chimera": cf.schemes.chimera(4, 8),
    "chimera, forward doubling": cf.schemes.chimera(4, 8, concat="forward-doubling"),
    "chimera, backward halving": cf.schemes.chimera(4, 8, concat="backward-halving"),
    "chimera, 2 pairs": cf.schemes.chimera(4, 8, pairs=2),
    "mixpipe, K=max": cf.schemes.mixpipe(4, 8, injected="max"),
    "hanayo, 1 wave": cf.schemes.hanayo(4, 8, waves=1),
    "hanayo, 2 waves": cf.schemes.hanayo(4, 8, waves=2),
    "zb-h1": cf.schemes.zb_h1(4, 8),
    "zb-h2": cf.schemes.zb_h2(4, 8),
    "zb-v": cf.schemes.zb_v(4, 8),
    "v-half": cf.schemes.v_half(4, 8),
    "v-min": cf.schemes.v_min(4, 8),
    "interleaved-zb, 2 chunks": cf.schemes.interleaved_zb(4, 8),
    "dualpipe": cf.schemes.dualpipe(4, 8),
    "dualpipe-v": cf.schemes.dualpipe_v(4, 8),
    "1F1B (dapple), split": cf.schemes.dapple(4, 8, split=True),
    "chimera, split": cf.schemes.chimera(4, 8, split=True),
    "pipedream": cf.schemes.pipedream(4, periods=12),
    "pipedream-2bw": cf.schemes.pipedream_2bw(4, 8),
    "wpipe": cf.schemes.wpipe(4, 8),
}


def test_the_table_of_schemes() -> None:
    lines = (DOCS / "choosing-a-scheme.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and " .. " in line]
    expected = []
    for name, schedule in SCHEDULES.items():
        costs = of_stages(cf.Costs(), schedule.placement, CostsOf.WORKER)
        row = Compared(cf.simulate(schedule, costs), 8)
        share = schedule.workers / schedule.stages
        least, bubbles = min(row.simulation.peak_activations) * share, 100 * row.bubble_ratio
        weights, most = row.weights, row.activations
        expected.append(f"| {name} | {bubbles:.1f} % | {weights:g} | {least:g} .. {most:g} |")
    assert rows == expected


def test_training_without_a_flush(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = blocks("choosing-a-scheme.md", "python")
    monkeypatch.setattr(cf, "launch", on_threads)
    exec(program, {"__name__": "__main__"})
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", capsys.readouterr().out)
    assert found
    assert float(found[2]) < 0.5 * float(found[1])


def on_threads(*arguments: Any, **options: Any) -> Any:
    """``cf.launch`` with threads of this process."""
    return launch(*arguments, **options | {"transport": "local"})


SMALLER = {
    "profile": (
        "--set model.layers=4 --set model.hidden=16 --set model.heads=2 --set model.positions=16 "
        "--sizes 1,2 --repeats 1"
    ),
    "--synthesize": "--moves 0",
    "train": "--set pipeline.transport=local --set train.threads=1",
}
"""What is put behind a command of the page on planning, which takes the last of two values."""


def test_from_a_profile_to_a_plan_to_a_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        " ".join([line, *(more for word, more in SMALLER.items() if word in line.split())])
        for block in blocks("planning.md", "console")
        for line in block.splitlines()
    ]
    # Those for two machines, which benchmarks/two_nodes.py runs on two, run on one here.
    commands = [re.sub(r"^\$ (torchrun .* -m )?counterflow ", "", command) for command in commands]
    kinds = ["profile", "plan", "plan", "train", "profile", "plan", "train"]
    assert [command.split()[0] for command in commands] == kinds
    for number, command in enumerate(commands):
        if number == 4:  # the second profile's workers are threads, the first one's processes
            monkeypatch.setattr("counterflow.measure.survey.launch", on_threads)
        done = run(command)
        assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        *("model.toml", "profile.toml", "cluster.toml"),
    }
    assert "Trained 20 steps" in done.out
    assert "planned from the profile's costs" in done.out


def test_the_three_files_of_a_plan() -> None:
    found: list[Any] = []
    loads = (
        input_files.load_model,
        input_files.load_profile,
        input_files.load_cluster,
        input_files.load_cluster,
    )
    for name, load in zip(("model", "profile", "cluster", "unequal_cluster"), loads, strict=True):
        found.append(load(DOCS.parent / "examples" / "plan_files" / f"{name}.toml"))
    model, profile, cluster, unequal = found
    assert len(model.layers) == 14
    assert profile.layer("block").seconds(OpKind.FORWARD, 3) == pytest.approx(0.002)
    assert cluster.allreduce_link(spans_nodes=True).seconds_per_byte == 2e-10
    blocks_alone, dapple = Model("blocks", ("block",) * 20), Constraints(schemes=("dapple",), depths=(10,))
    best = search(blocks_alone, profile, unequal, 40, dapple).best[0].play
    slow = [worker for worker, slowness in enumerate(best.network.slowness) if slowness == 1.8]
    ends = [0, *best.stages.cuts, 20]
    assert [ends[worker + 1] - ends[worker] for worker in slow] == [1, 1]  # of others' 2 and more


def test_your_own_scheme() -> None:
    (program,) = blocks("your-own-scheme.md", "python")
    scope: dict[str, Any] = {}
    exec(program, scope)
    try:
        schedule = registry.build("queue", {"stages": 4, "micro_batches": 8, "halves": True})
        cf.check(schedule)
        # All forwards, then the last stage's backwards; the last one comes down the pipe half by half.
        assert cf.simulate(schedule).makespan == (8 + 3) * 1 + 8 * 2 + 3 * 1
    finally:
        del registry.SCHEMES["queue"]


def test_the_schedule_file() -> None:
    """The file is what is written, each key has its row, and each op is read."""
    (file,) = blocks("schedule-file.md", "json")
    assert file == formats.dumps(cf.schemes.dapple(stages=2, micro_batches=2))
    rows = re.findall(r"^\| (`.*`) \|", (DOCS / "schedule-file.md").read_text(), re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`(.+?)`", row)]
    keys = [word for word in words if word.islower()]
    assert sorted(keys) == sorted(formats.KEYS)
    ops = [word for word in words if not word.islower()]
    assert [str(formats.parse_op(op)) for op in ops] == ops
    assert len(ops) == 9


def test_computed_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page prints is what comes out, but for the proof, which a kept table has: it takes long."""
    page = "computed-orders.md"
    monkeypatch.chdir(tmp_path)
    bounds, quick, proved, orders = blocks(page, "text")
    exec("\n".join(blocks(page, "python")), {})
    assert capsys.readouterr().out == bounds + orders
    assert Path("memory.png").stat().st_size > 10_000
    _, *words = shlex.split(blocks(page, "console")[0].removeprefix("$ "))
    answer = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(application(), words)
    assert answer.stdout.split() == quick.split()
    kept = (DOCS.parent / "benchmarks" / "results" / "computed_orders_proofs.txt").read_text()
    (row,) = re.findall(r"^vee +4 +8 3,4,2 +4 +makespan .*", kept, re.MULTILINE)
    assert row.split()[6:10] == ["200", "200", "200", "proved"]
    assert "makespan     200 s" in proved
    assert "gap          none" in proved


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cf.launch(_page_of_checkpoints, workers=2, transport="local")


def _page_of_checkpoints() -> None:
    (program,) = blocks("checkpoints.md", "python")
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    pipeline = cf.Pipeline(layers, torch.nn.MSELoss(), cf.schemes.chimera(2, 2), optimizer=optimizer)
    for _ in range(2):
        pipeline.step(*torch.ones(2, 4, 4))
    scope: dict[str, Any] = {"pipeline": pipeline}
    exec(program, scope)
    assert scope["step"] == 2
    assert scope["weights"].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (section,) = blocks("logging.md", "toml")
    small = "[model]\nlayers = 2\nhidden = 16\nheads = 2\npositions = 16\n[pipeline]\ntransport = 'local'\n"
    few = f"{section}steps = 2\nsamples = 16\nthreads = 1\n[schedule]\nstages = 2\n"
    Path("my.toml").write_text(small + few)
    callback, loop, profiled = blocks("logging.md", "python")
    exec(callback, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == [
        "chimera with 2 workers",
        "step 2: validation loss is finite, True",
        "over",
        "2 steps",
    ]
    assert list(Path("runs/chimera-1/tensorboard").iterdir())
    monkeypatch.setattr(cf, "launch", on_threads)
    exec(loop, {"__name__": "__main__"})
    assert list(Path("board").iterdir())
    (tmp_path / "profiled.py").write_text(profiled)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    launching(tmp_path / "profiled.py")
    for worker in (0, 1):
        names = {
            event.get("name")
            for event in json.loads(Path(f"worker-{worker}.json").read_text())["traceEvents"]
        }
        assert {f"Forward F3.{worker}", f"InputGradient I3.{worker}", f"WeightGradients W0.{worker}"} <= names
        # what ends on other threads, and perhaps after the profile, would break the process
        assert not {name for name in names if str(name).startswith("gloo:")}


def test_the_life_of_a_schedule() -> None:
    """The page's program is a session of Python; its answers are compared."""
    page = DOCS / "how-it-is-built.md"
    found = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 10
    assert not found.failed


def test_the_picture_of_the_rooms() -> None:
    made = runpy.run_path(str(DOCS / "rooms_picture.py"))
    assert made["PICTURE"].read_text(encoding="utf-8") == made["picture"]()
    rooms = {room for layer in made["layers"]() for room in layer}
    package = DOCS.parent / "src" / "counterflow"
    assert rooms == {path.parent.name for path in package.glob("*/__init__.py")}


def test_slices_are_what_their_program_draws() -> None:
    page = DOCS / "pipeline-schedules.md"
    found = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted >= 6
    assert not found.failed


def test_long_sequences(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "long-sequences.md"
    found = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted >= 2
    assert not found.failed
    monkeypatch.chdir(DOCS.parent)
    lines = "".join(blocks("long-sequences.md", "sh")).replace("\\\n", "").splitlines()
    assert len(lines) == 5
    for line in lines:
        answer = run(*shlex.split(line.removeprefix("counterflow ")))
        assert answer.code == 0, answer
        if "--by-length" in line:
            assert (
                "Slices win already at 2,048 positions, the shortest sequence tried: 1.07 times" in answer.out
            )
            assert "2.03" in answer.out
    layer = blocks("long-sequences.md", "python")[2]
    exec(layer + "\nRecurrent()(torch.ones(1, 2, 32))", {"cf": cf, "nn": torch.nn, "torch": torch})
