"""What a run's config holds: defaults, resolution, and checks between keys."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterflow import ConfigError, Pipeline, schemes
from counterflow.common.options import metadata
from counterflow.execution import Execution
from counterflow.models.shapes import SHAPES, Family
from counterflow.schedule.formats import dumps
from counterflow.schedule.registry import SCHEMES, title
from counterflow.training import RunConfig, load_config
from counterflow.training.load import SECTIONS
from counterflow.training.sections.pipeline_section import PipelineSection
from counterflow.training.sections.schedule_section import ScheduleSection
from counterflow.training.sources.built_in import family_of


def test_an_empty_config_is_the_built_in_example() -> None:
    config = RunConfig()
    assert config == load_config()
    assert config.build_schedule() == schemes.chimera(stages=4, micro_batches=8)
    assert (family_of(config.model.kind), config.model.vocabulary, config.data.path) == (
        Family.GPT,
        256,
        None,
    )
    assert config.train.samples == 64


def test_learning_rate_and_warm_up_follow_from_the_model_and_the_steps() -> None:
    optimizer = RunConfig.model_validate({"model": {"kind": "gpt-2"}, "train": {"steps": 10}}).optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (0.64 / 1280, 2)
    assert load_config(steps=100_000).optimizer.warmup_steps == 2000
    given = load_config(sets=["optimizer.learning_rate=1e-4", "optimizer.warmup_steps=0"])
    assert (given.optimizer.learning_rate, given.optimizer.warmup_steps) == (1e-4, 0)
    assert "learning_rate = 0.01  #" in load_config().to_toml()


def test_torch_is_not_imported() -> None:
    code = "import sys, counterflow.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_option_of_every_scheme_is_a_key() -> None:
    options = {option.name for scheme in SCHEMES.values() for option in scheme.options}
    assert set(ScheduleSection.keys_known()) == options | {"scheme", "file", "slices"}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_described_and_its_default_legal(name: str) -> None:
    section = SECTIONS[name]
    for key, (about, rule) in section.keys_known().items():
        if (info := section.model_fields.get(key)) is None:  # of a scheme
            continue
        assert about
        assert "\n" not in about
        for part in (info.annotation, *get_args(info.annotation)):
            if get_origin(part) is Literal:
                assert all(word in rule for word in get_args(part))
    assert section.model_validate(section().values()) == section()


# --- Resolution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [*SCHEMES, "1f1b"])
def test_every_scheme_has_four_workers_and_two_micro_batches_a_worker_unless_told(scheme: str) -> None:
    schedule = load_config(scheme=scheme, sets=["model.layers=20"]).build_schedule()
    assert schedule.workers == 4
    assert schedule.micro_batches == (1 if scheme == "pipedream" else 8)


def test_micro_batches_follow_the_depth() -> None:
    assert load_config(sets=["schedule.stages=6"]).schedule.options()["micro_batches"] == 12


def test_a_model_without_vocabulary_has_the_datas() -> None:
    assert load_config(sets=["model.kind=bert"]).model.vocabulary == 257
    assert load_config(sets=["model.kind=bert", "model.vocabulary=300"]).model.vocabulary == 300


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_gives_the_shape_and_keys_change_it(name: str) -> None:
    model = load_config(sets=[f"model.kind={name}", "model.layers=4"]).model
    preset = SHAPES[name]
    assert (family_of(model.kind), model.layers, model.hidden) == (preset.family, 4, preset.hidden)
    assert (model.heads, model.positions, model.vocabulary) == (
        preset.heads,
        preset.positions,
        preset.vocabulary,
    )


def test_without_a_word_the_model_is_the_example() -> None:
    example = load_config(sets=["model.kind=example"]).model
    assert RunConfig().model == example.model_copy(update={"kind": "gpt"})


def test_a_schedule_file(tmp_path: Path) -> None:
    schedule = schemes.gpipe(stages=2, micro_batches=3)
    (tmp_path / "x.json").write_text(dumps(schedule))
    config = load_config(sets=[f"schedule.file={tmp_path / 'x.json'}"])
    assert config.build_schedule() == schedule
    assert config.schedule.scheme is None
    assert config.results_folder(tmp_path) == tmp_path / "x-1"


def test_the_results_folder_is_the_next_free_one(tmp_path: Path) -> None:
    (tmp_path / "chimera-1").mkdir()
    assert RunConfig().results_folder(tmp_path) == tmp_path / "chimera-2"
    assert load_config(out="here").results_folder(tmp_path) == Path("here")


def test_the_number_of_processes() -> None:
    config = load_config(sets=["pipeline.replicas=2"])
    config.expect_processes(8)
    with pytest.raises(ConfigError, match=r"6 processes .* 4 workers .* 2 replicas need 8: start 8$"):
        config.expect_processes(6)
    with pytest.raises(ConfigError, match=r"start 8, or set pipeline\.replicas to 3"):
        config.expect_processes(12)


# --- Checks between keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["train.samples=4"],
            "train.samples = 4: cannot be cut into the 8 micro-batches of chimera; "
            "give train.samples = 8 or more, or schedule.micro_batches = 4 or fewer",
        ),
        (
            ["train.samples=15", "schedule.concat=backward-halving"],
            "train.samples = 15: cannot be cut into the 8 micro-batches of chimera, each in 2 parts; "
            "give train.samples = 16 or more, or schedule.micro_batches = 7 or fewer",
        ),
        (
            ["model.layers=1"],
            "model.layers = 1: with embedding and head the model has 3 layers, fewer than the 4 stages of "
            "chimera; give model.layers = 2 or more, or 3 stages or fewer",
        ),
        (
            ["model.hidden=100", "model.heads=8"],
            "model.hidden = 100: must be a multiple of model.heads = 8; nearest: 96 or 104",
        ),
        (
            ["model.vocabulary=255"],
            "model.vocabulary = 255: must be 256 or more: the data has 256 bytes",
        ),
        (
            ["model.kind=bert", "model.vocabulary=256"],
            "model.vocabulary = 256: must be 257 or more: the data has 256 bytes and the mask token",
        ),
        (
            ["pipeline.zero_stage=1", "pipeline.barrier=false"],
            "pipeline.zero_stage = 1: updated weights are sent when a step ends on all workers, and with no "
            "barrier it does not; use only one of them",
        ),
        (
            ["pipeline.zero_stage=1", "schedule.scheme=pipedream-2bw"],
            "pipeline.zero_stage = 1: updated weights are sent when a step ends on all workers, and with no "
            "flush in pipedream-2bw it does not; use only one of them",
        ),
        (
            ["model.kind=gtp"],
            "model.kind = \"gtp\": unknown; did you mean 'gpt'? Known: gpt, bert, huggingface, "
            + ", ".join(SHAPES),
        ),
        (
            ["schedule.stages=3"],
            "schedule.stages = 3: two directions need an even number of stages, 2 or more; use 2 or 4",
        ),
        (
            ["schedule.concat=x"],
            "schedule.concat = 'x': unknown; legal: direct, forward-doubling, backward-halving",
        ),
        (
            ["schedule.waves=2"],
            "schedule: chimera has no option 'waves'; "
            "its options: stages, micro_batches, pairs, concat, split",
        ),
        (
            ["schedule.scheme=hanayo", "schedule.stages=3", "schedule.micro_batches=4"],
            "schedule.stages = 3: hanayo has 2 stages on each of its workers with these options; "
            "give schedule.workers = NUMBER",
        ),
        (
            ["schedule.scheme=mixpipe", "schedule.injected=most"],
            "schedule.injected = 'most': must be a whole number or max (even, 2..stages, or max)",
        ),
        (
            ["schedule.scheme=chimra"],
            "schedule.scheme: unknown scheme 'chimra'; did you mean 'chimera'? "
            f"Known: {', '.join(map(title, SCHEMES))}",
        ),
        (
            ["pipeline.cuts=[1, 2]"],
            "pipeline.cuts = [1, 2]: 2 cuts make 3 stages, but chimera has 4; give 3 cuts",
        ),
        (
            ["pipeline.cuts=[1, 3, 10]"],
            "pipeline.cuts = [1, 3, 10]: must rise from 1 or more to 9 or less, "
            "so that each stage has one of the 10 layers (embedding, blocks, head)",
        ),
        (
            ["optimizer.momentum=0.9"],
            "optimizer.momentum = 0.9: adamw has no such key (it has betas); "
            "leave it out, or choose another optimizer.name",
        ),
        (
            ["optimizer.name=sgd", "optimizer.betas=[0.5, 0.9]"],
            "optimizer.betas = [0.5, 0.9]: sgd has no such key (it has momentum); "
            "leave it out, or choose another optimizer.name",
        ),
        (
            ["schedule.file=x.json", "schedule.stages=4", "schedule.pairs=1"],
            'schedule.file = "x.json": a file fixes the scheme and its options; '
            "leave out schedule.stages, schedule.pairs",
        ),
        (
            ["schedule.file=nothing.json"],
            'schedule.file = "nothing.json": no such file; `counterflow export SCHEME` writes one',
        ),
    ],
)
def test_keys_that_do_not_fit(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(sets=sets)
    assert str(raised.value) == message


def test_what_fits_just_so() -> None:
    load_config(sets=["train.samples=8"])
    load_config(sets=["train.samples=16", "schedule.concat=backward-halving"])
    load_config(sets=["model.layers=2"])
    load_config(sets=["pipeline.cuts=[1, 2, 9]"])
    load_config(sets=["optimizer.name=sgd", "optimizer.momentum=0.9"])


def test_a_damaged_or_wrong_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"schedule\.file = .*x\.json\": is not a text file \(byte 0"):
        load_config(sets=[f"schedule.file={path}"])
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"schedule\.file = .*: not JSON"):
        load_config(sets=[f"schedule.file={path}"])
    with pytest.raises(ConfigError, match=r"schedule\.file = .*: cannot be read: Is a directory"):
        load_config(sets=[f"schedule.file={tmp_path}"])
    text = dumps(schemes.dapple(stages=2, micro_batches=1))
    path.write_text(text.replace('"F0.0", "B0.0"', '"B0.0", "F0.0"'))
    with pytest.raises(
        ConfigError, match=r"does not pass the checker: (?s:.*)B0\.0 comes before its forward"
    ):
        load_config(sets=[f"schedule.file={path}"])
    path.write_text(dumps(schemes.dapple(stages=2, micro_batches=9)))
    with pytest.raises(
        ConfigError, match=r"into the 9 micro-batches of dapple; give train\.samples = 9 or more$"
    ):
        load_config(sets=[f"schedule.file={path}", "train.samples=8"])


# --- Text and back --------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
shares = st.floats(0, 0.99)
INJECTED: list[int | str] = [2, 4, "max"]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 4))
    scheme = draw(st.sampled_from([*SCHEMES, None]))
    schedule: dict[str, Any] = {} if scheme is None else {"scheme": scheme}
    if scheme == "mixpipe":
        schedule |= draw(st.fixed_dictionaries({}, optional={"injected": st.sampled_from(INJECTED)}))
    if scheme in {None, "chimera"}:
        schedule |= draw(st.fixed_dictionaries({}, optional={"pairs": st.integers(1, 2)}))
    train: dict[str, st.SearchStrategy[Any]] = {
        "steps": st.integers(1, 10**9),
        "samples": st.integers(8, 10**5),
        "seed": st.integers(0, 2**32 - 1),
        "out": texts,
        "threads": st.integers(1, 1024),
    }
    pipeline: dict[str, st.SearchStrategy[Any]] = {
        "replicas": st.integers(1, 10**5),
        "recompute": st.sampled_from(["none", "stage", "layer"]),
        "sync": st.sampled_from(["end", "eager", "eager-opt"]),
        "autocast": st.just("bfloat16"),
        "compute_dtype": st.just("bfloat16"),
        "clip_norm": st.floats(0, allow_infinity=False),
        "compile": st.booleans(),
    }
    flushes = scheme is None or SCHEMES[scheme].synchronous
    if flushes:
        pipeline["autocast"] = st.sampled_from(["bfloat16", "float16"])
        pipeline["loss_scale"] = st.sampled_from([2.0**-126, 1.0, 2.0**24, 2.0**127])
    if flushes and draw(st.booleans()):
        pipeline["zero_stage"] = st.integers(0, 1)
    else:
        pipeline["barrier"] = st.booleans()
    return {
        "model": {
            "kind": draw(st.sampled_from(["gpt", "bert", *SHAPES])),
            "layers": draw(st.integers(14, 99)),
            "heads": heads,
            "hidden": heads * draw(st.integers(1, 9)),
            "dropout": draw(shares),
        },
        "data": draw(st.fixed_dictionaries({}, optional={"path": texts})),
        "schedule": schedule,
        "pipeline": draw(st.fixed_dictionaries({}, optional=pipeline)),
        "optimizer": draw(st.fixed_dictionaries({}, optional={"betas": st.tuples(shares, shares).map(list)})),
        "train": draw(st.fixed_dictionaries({}, optional=train)),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=configs())
def test_what_is_written_reads_back_equal(values: dict[str, Any], tmp_path: Path) -> None:
    config = RunConfig.model_validate(values)
    text = config.to_toml()
    assert RunConfig.model_validate(tomllib.loads(text)) == config
    (tmp_path / "config.toml").write_text(text, encoding="utf-8", newline="")
    assert load_config(tmp_path / "config.toml") == config


BESIDE = {
    **dict.fromkeys(
        ["model", "loss_function", "schedule", "list_layers", "optimizer", "scheduler"],
        "other sections say it",
    ),
    "mesh": "the plan's nodes and pipeline.replicas say it",
    "device": "the launch says it",
    "example": "a config's model is a list of layers",
    "costs": "pipeline.cuts says what follows from them",
    "parallelize": "a function of the user's",
    "execution": "the section is one",
    "batching": "dimension 0 of its data is the samples, which all have the same length",
    "options": "fields of the two",
}
"""Why ``Pipeline`` is given it beside a config's ``[pipeline]``."""


def test_every_option_of_a_pipeline_has_a_key_or_a_reason() -> None:
    keys = PipelineSection.keys_known()
    assert issubclass(PipelineSection, Execution)
    for name, info in Execution.model_fields.items():
        assert (name in keys) != bool(metadata(info, "no_key"))
    beside = keys.keys() - Execution.model_fields
    assert beside == {"transport", "cuts", "replicas"}
    assert set(inspect.signature(Pipeline).parameters) == BESIDE.keys() | beside - {"replicas"}


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.count_memory_steps: unknown key"):
        load_config(sets=["pipeline.count_memory_steps=3"])


def test_a_config_executes_with_defaults_of_its_own() -> None:
    section, plain = RunConfig().pipeline, Execution()
    differing = {name for name in Execution.model_fields if getattr(section, name) != getattr(plain, name)}
    assert differing == {"clip_norm", "timeout_seconds"}
    assert (plain.clip_norm, section.clip_norm, section.timeout_seconds) == (None, 1.0, 300.0)
    assert load_config(sets=["pipeline.clip_norm=0"]).pipeline.max_norm is None
