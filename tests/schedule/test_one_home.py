"""A scheme has one home: what is defined here, and nowhere else, is used by every command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from counterflow import ConfigError, schemes
from counterflow.cli import application
from counterflow.drawing.charting import chart_of
from counterflow.papers.step_times import StageTimes, closed_form
from counterflow.planning import Configuration
from counterflow.planning.prediction import choices
from counterflow.schedule import registry
from counterflow.schedule.formats import dumps, loads
from counterflow.schedule.ir import Op, OpKind, OptionValue, Schedule
from counterflow.schedule.placement import looped
from counterflow.schedule.scheme import MICRO_BATCHES, Directions, Option, OptionType, Scheme
from counterflow.schedule.workload import Pass, Share, Workload
from counterflow.simulation import simulate
from counterflow.training import load_config

# --- A scheme, in less than 40 lines ---------------------------------------------------------------------


def queue(
    stages: int, micro_batches: int, slices: int = 1, backwards: str = "first-in", halves: bool = False
) -> Schedule:
    """All forwards, then all backwards, as a whole or in halves, the first or the last micro-batch first."""
    if slices < 1 or micro_batches < 1:
        raise ConfigError(f"slices={slices}, micro_batches={micro_batches}: must be 1 or more")
    turn = list(range(micro_batches))[:: 1 if backwards == "first-in" else -1]
    parts = 2 if halves else 1

    def order(worker: int) -> Iterator[Op]:
        held = range(worker, stages * slices, stages)
        yield from (Op(OpKind.FORWARD, s, (m,)) for s in held for m in range(micro_batches))
        for s, m in ((s, m) for s in reversed(held) for m in turn):
            yield from (Op(OpKind.BACKWARD, s, (m,), part=part, parts=parts) for part in range(parts))

    shares = (tuple(Share((m,), part, parts) for part in range(parts)) for m in range(micro_batches))
    passes = tuple(Pass(0, (m,), share) for m, share in enumerate(shares))
    workload = Workload(looped(stages, slices), micro_batches, passes)
    numbers = (("stages", stages), ("micro_batches", micro_batches), ("slices", slices))
    options = (*numbers, ("backwards", backwards), ("halves", halves))
    return Schedule("queue", options, workload, tuple(tuple(order(worker)) for worker in range(stages)))


def worth_trying(workers: int, _micro_batches: int, layers: int) -> Iterator[Mapping[str, OptionValue]]:
    return ({"slices": n, "halves": h} for n in range(1, layers // workers + 1) for h in (False, True))


SLICES = Option("slices", "1 or more", "slices of the model on a worker", 1, noun="slice", unsaid=1)
WORDS = ("first-in", "last-in")
BACKWARDS = Option("backwards", "", "which comes first", "first-in", kind=OptionType.WORD, words=WORDS)
HALVES = Option("halves", "", "divide every backward", default=False, kind=OptionType.FLAG)
STAGES = Option("stages", "1 or more", "workers", letter="D")
OPTIONS = (STAGES, MICRO_BATCHES, SLICES, BACKWARDS, HALVES)
QUEUE = Scheme("queue", queue, "a queue", "this test", OPTIONS, planner=worth_trying, chunk="slice")

# ---------------------------------------------------------------------------------------------------------

LINE = "queue --stages 2 --micro-batches 4 --slices 2 --backwards last-in --halves"
GIVEN: dict[str, OptionValue] = {
    "stages": 2,
    "micro_batches": 4,
    "slices": 2,
    "backwards": "last-in",
    "halves": True,
}

Run = Callable[..., str]


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a command that knows the scheme."""

    def run_(line: str, *more: str) -> str:
        result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}).invoke(
            application(), [*line.split(), *more], prog_name="counterflow"
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    with registry.registered(QUEUE):
        yield run_
    assert registry.find("queue") is None


def test_simulate_check_and_export(run: Run, tmp_path: Path) -> None:
    shown = json.loads(run(f"simulate {LINE} --json"))
    assert shown["options"] == GIVEN
    assert shown["makespan"] == simulate(queue(2, 4, 2, "last-in", halves=True)).makespan
    assert json.loads(run(f"check {LINE} --json"))["ok"]
    path = tmp_path / "queue.json"
    run(f"export {LINE} --out", str(path))
    assert loads(path.read_text(), "queue.json") == queue(2, 4, 2, "last-in", halves=True)
    assert json.loads(run("simulate --json", str(path))) == shown


def test_show(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "queue.svg"
    assert "queue  D=2, N=4, 2 slices, last-in, halves" in run(f"show {LINE}")
    run(f"show {LINE} --compare gpipe --out", str(path))
    assert path.exists()
    chart = chart_of(simulate(registry.build("queue", GIVEN)))
    assert [lane.name for lane in chart.lanes] == ["slice 0", "slice 1"]
    plain = chart_of(simulate(queue(2, 4)))
    assert plain.heading == "queue  D=2, N=4, first-in"


def test_help_and_the_list_of_schemes(run: Run) -> None:
    shown = re.sub(r"[\s│]+", " ", run("simulate --help"))
    assert "slices of the model on a worker, default 1 (queue)." in shown
    assert "Which comes first, default first-in (queue). One of first-in, last-in." in shown
    assert "--no-halves" in shown
    assert "queue  a queue" in run("schemes")


def test_plan(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    given = "--example chimera-bert48 --scheme queue --workers 4 --micro-batch-size 1 --micro-batch-size 16"
    found = json.loads(run(f"plan {given} --cuts even --json"))
    best = found["best"][0]
    assert (best["scheme"], best["options"]["stages"]) == ("queue", 4)
    # 50 layers: 1 to 12 slices; of one sample there are no halves; three kinds of recomputation,
    # zero_stage 0 and 1.
    assert found["rejected"][0]["candidates"] == 12 * (1 + 2) * 3 * 2
    run(f"plan {given} --out", str(out))
    assert str(load_config(out).build_schedule()).startswith("queue(stages=4")
    told = choices(Configuration.of("queue", GIVEN, 1, 1))
    assert told == "slices=2 backwards=last-in halves=True"


def test_verify(run: Run) -> None:
    assert json.loads(run(f"verify {LINE} --steps 2 --json"))["ok"]


def test_train(run: Run, tmp_path: Path) -> None:
    keys = ["model.layers=2", "model.hidden=8", "model.heads=2", "model.positions=8", "train.samples=8"]
    keys += [
        "schedule.slices=2",
        "schedule.halves=true",
        "pipeline.transport=local",
        "train.evaluate_every=0",
    ]
    sets = [word for key in keys for word in ("--set", key)]
    out = tmp_path / "run"
    run("train --scheme queue --workers 2 --steps 2 --json", *sets, "--out", str(out))
    written = (out / "config.toml").read_text()
    assert "slices = 2  # slices of the model on a worker\n" in written
    config = load_config(out / "config.toml")
    assert config.build_schedule() == queue(2, 4, slices=2, halves=True)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["slices=two"], r'schedule.slices = "two": must be a whole number'),
        (["slices=true"], r"schedule.slices = true: must be a whole number"),
        (["halves=1"], r"schedule.halves = 1: must be true or false"),
        (["backwards=3"], r"schedule.backwards = 3: must be one of first-in, last-in, in quotes"),
        (["backwards=all"], r"schedule.backwards = 'all': unknown; legal: first-in, last-in"),
        (["waves=2"], r"schedule: queue has no option 'waves'"),
        (["slics=2"], r"schedule.slics: unknown key; did you mean schedule.slices\?"),
    ],
)
def test_a_wrong_key_is_refused(sets: list[str], message: str) -> None:
    with registry.registered(QUEUE), pytest.raises(ConfigError, match=message):
        load_config(scheme="queue", sets=[f"schedule.{text}" for text in sets])


def test_what_no_record_says_is_not_said() -> None:
    """Papers have no form for it; a schedule whose scheme is not known any more is still drawn and read."""
    assert closed_form(queue(2, 4), StageTimes(1.0, 2.0, 0.0, 0.0)) is None
    assert (
        chart_of(simulate(queue(2, 4, 2))).heading
        == "queue  D=2, N=4, slices=2, backwards=first-in, halves=False"
    )
    assert loads(dumps(queue(2, 4)), "x.json") == queue(2, 4)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (replace(QUEUE, name="1f1b"), "scheme 1f1b: the name '1f1b' is taken"),
        (replace(QUEUE, aliases=("chimera",)), "scheme queue: the name 'chimera' is taken"),
        (replace(QUEUE, options=OPTIONS[1:]), "needs an option for its workers: stages or workers"),
        (replace(QUEUE, version=lambda *_: 0), "asynchronous, so it needs the option periods"),
        (
            replace(QUEUE, options=(STAGES, Option("concat", "", ""))),
            "its option concat is a whole number, but chimera's option of this name is one of direct, ",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_refused(scheme: Scheme, message: str) -> None:
    before = dict(registry.SCHEMES)
    with pytest.raises(ConfigError, match=message):
        registry.register(scheme)
    assert before == registry.SCHEMES


def test_an_option_that_is_a_flag_of_a_command_is_refused() -> None:
    scheme = replace(QUEUE, options=(*OPTIONS, Option("recompute", "", "")))
    with registry.registered(scheme):
        answer = CliRunner().invoke(application(), ["simulate", "chimera"])
    assert answer.exit_code == 2
    assert "simulate has a flag --recompute; give the scheme's option" in answer.stderr


@pytest.mark.parametrize("name", registry.SCHEMES)
def test_a_record_agrees_with_its_builder(name: str) -> None:
    """Its defaults are the builder's, and its workload and directions those of what is built."""
    scheme = registry.scheme(name)
    required = [option.name for option in scheme.options if option.required]
    given: dict[str, OptionValue] = {name: 8 if name == "micro_batches" else 4 for name in required}
    schedule = scheme.build(**given)
    built: dict[str, Any] = dict(schedule.options)
    # What is false is not said.
    flags = {option.name: False for option in scheme.options if option.kind is OptionType.FLAG}
    assert list(built | flags) == [option.name for option in scheme.options]
    assert built.keys().isdisjoint(flags)
    for flag in flags:
        if flag == "asymmetric":  # an order that few depths have
            continue
        split = scheme.build(**given, **{flag: True})
        assert dict(split.options) == built | {flag: True}
        assert scheme.workload_of(dict(split.options)) == split.workload != schedule.workload
    built |= flags
    for option in scheme.options:
        if not option.required:
            assert built[option.name] == (built[option.like] if option.like else option.default)
    assert scheme.workload_of(given) == schedule.workload
    assert scheme.workload_of(built) == schedule.workload
    assert (scheme.directions is Directions.TWO) == (schedule.pipes > 1)
    tried = [
        given | {name: 8 for name in given if name == "micro_batches"} | dict(options)
        for options in scheme.planner(4, 8, 32)
    ]
    for options in tried:
        assert scheme.workload_of(options) == scheme.build(**options).workload
        if scheme.most_stashed and (most := scheme.most_stashed(**options)) is not None:
            assert max(simulate(scheme.build(**options)).peak_activations) <= most
    assert tried


def test_names_of_schemes_are_said_in_their_files_alone() -> None:
    """No module of the planner, the pictures or the commands' options tells schemes apart by their names."""
    source = Path(schemes.__file__).parents[2]
    homes = [
        *(source / "plan").glob("*.py"),
        *(source / "draw").glob("*.py"),
        *(source / "schedule").glob("*.py"),
    ]
    homes += (source / "cli" / "options").glob("*.py")
    homes += [
        source / "cli" / name for name in ("commands/schemes.py", "commands/plan.py", "output/plan_tables.py")
    ]
    homes += [source / "training" / "load.py"]
    names = [name for known in registry.SCHEMES.values() for name in (known.name, *known.aliases)]
    for path in homes:
        code = "".join(line for line in path.read_text().splitlines(keepends=True) if ">>>" not in line)
        for name in names:
            assert f'"{name}"' not in code, f"{path.name} names {name}"
