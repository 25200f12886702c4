"""From a file and overrides to a config: layers, and each wrong input with its message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from counterflow import ConfigError
from counterflow.schedule.modes import Recompute
from counterflow.training import RunConfig, load_config

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write ``run.toml`` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_(text: str) -> Path:
        Path("run.toml").write_text(text, encoding="utf-8")
        return Path("run.toml")

    return write_


def refused(path: Path | None = None, *sets: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(path, sets)
    return str(raised.value)


# --- Layers ---------------------------------------------------------------------------------------------


def test_a_file(write: Write) -> None:
    path = write(
        '[train]\nsteps = 7\n[pipeline]\nrecompute = "stage"\ncuts = [1, 2, 4]\n'
        "clip_norm = 2\n[data]\npath = 'C:\\texts'\n"
    )
    config = load_config(path)
    assert config == load_config(str(path))
    assert (config.train.steps, config.pipeline.cuts) == (7, (1, 2, 4))
    assert config.pipeline.recompute is Recompute.STAGE
    assert (config.pipeline.clip_norm, type(config.pipeline.clip_norm)) == (2.0, float)
    assert config.data.path == Path("C:\\texts")


def test_an_empty_file_is_the_built_in_example(write: Write) -> None:
    assert load_config(write("")) == load_config() == RunConfig()


def test_later_layers_win(write: Write) -> None:
    path = write("[train]\nsteps = 1\nseed = 1\nsamples = 11\n")
    train = load_config(path, ["train.steps=2", "train.seed=2", "train.seed=3"], steps=4).train
    assert (train.samples, train.seed, train.steps) == (11, 3, 4)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("train.out=runs/a=b", Path("runs/a=b")),
        ("train.out='x'", Path("x")),
        (' train . out = "5" ', Path("5")),
        ("train.out=a\nsteps=3", Path("a\nsteps=3")),
    ],
)
def test_an_override_is_toml_or_a_text(given: str, value: Path) -> None:
    assert load_config(sets=[given]).train.out == value


def test_overrides_of_every_type() -> None:
    config = load_config(
        sets=["pipeline.compile=true", "optimizer.betas=[0.8, 0.9]", "train.seed=0x10", "model.dropout=1e-1"]
    )
    assert config.pipeline.compile
    assert (config.optimizer.betas, config.train.seed, config.model.dropout) == ((0.8, 0.9), 16, 0.1)


def test_an_override_without_value_is_the_default_again(write: Write) -> None:
    path = write('[pipeline]\nautocast = "bfloat16"\n')
    assert load_config(path).pipeline.autocast == "bfloat16"
    assert load_config(path, ["pipeline.autocast="]) == RunConfig()
    assert load_config(None, ["train.steps="]) == RunConfig()


# --- Another scheme, another depth ----------------------------------------------------------------------


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_new_scheme_takes_over_the_options_it_has(write: Write, by_flag: bool) -> None:
    path = write('[schedule]\nscheme = "chimera"\nstages = 2\nmicro_batches = 6\nconcat = "direct"\n')

    def changed(scheme: str, *sets: str) -> dict[str, object]:
        if by_flag:
            return dict(load_config(path, sets, scheme=scheme).schedule.values())
        return dict(load_config(path, [*sets, f"schedule.scheme={scheme}"]).schedule.values())

    assert changed("dapple") == {"scheme": "dapple", "stages": 2, "micro_batches": 6}
    assert changed("hanayo") == {"scheme": "hanayo", "workers": 2, "micro_batches": 6}
    assert changed("chimera")["concat"] == "direct"
    assert changed("hanayo", "schedule.workers=1")["workers"] == 1
    with pytest.raises(ConfigError, match="dapple has no option 'concat'"):
        changed("dapple", "schedule.concat=direct")


def test_a_new_scheme_does_not_hide_a_misspelt_key(write: Write) -> None:
    path = write("[schedule]\nstagse = 2\n")
    with pytest.raises(ConfigError, match=r"schedule\.stagse: unknown key"):
        load_config(path, scheme="dapple")


def test_a_scheme_replaces_a_file_and_a_file_a_scheme(write: Write) -> None:
    path = write('[schedule]\nfile = "x.json"\n')
    assert load_config(path, scheme="gems").schedule.values() == {
        "scheme": "gems",
        "stages": 4,
        "micro_batches": 8,
    }
    path = write('[schedule]\nscheme = "gems"\nstages = 2\n')
    assert refused(path, "schedule.file=x.json").startswith(
        'run.toml: schedule.file = "x.json": no such file'
    )


@pytest.mark.parametrize(
    ("scheme", "option"),
    [(None, "stages"), ("dapple", "stages"), ("hanayo", "workers"), ("wpipe", "workers")],
)
def test_workers_by_the_option_of_the_scheme(scheme: str | None, option: str) -> None:
    config = load_config(scheme=scheme, workers=2)
    assert config.schedule.options()[option] == 2
    assert config.build_schedule().workers == 2


def test_workers_beside_a_schedule_file(write: Write) -> None:
    path = write('[schedule]\nfile = "x.json"\n')
    with pytest.raises(ConfigError, match=r'--workers 3: schedule\.file = "x\.json" fixes the workers'):
        load_config(path, workers=3)


# --- Wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train\n",
            "run.toml: not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)",
        ),
        ("x = " + "[" * 5000, "run.toml: "),
        (
            "[trian]\nsteps = 1",
            "run.toml: unknown section 'trian'; did you mean train? "
            "Sections: model, data, lora, schedule, pipeline, mesh, optimizer, train",
        ),
        ("steps = 1", "run.toml: unknown section 'steps'; did you mean train.steps? Sections: "),
        ("train = 1", "run.toml: train = 1: must be a section; write [train], and its keys below"),
        ("[[train]]", "run.toml: train = [{}]: must be a section; write [train], and its keys below"),
        (
            "[train]\nstesp = 1",
            "run.toml: train.stesp: unknown key; did you mean train.steps? Keys of train: "
            "steps, samples, seed, evaluate_every, checkpoint_every, memory_every, "
            "fewer_after, ema_decay, keep_last, keep_best, out, resume, loggers, threads",
        ),
        (
            "[train]\nreplicas = 1",
            "run.toml: train.replicas: unknown key; did you mean pipeline.replicas?",
        ),
        ("[train]\nzzz = 1", "run.toml: train.zzz: unknown key. Keys of train: steps, "),
        ("[train]\nsteps = 0", "run.toml: train.steps = 0: must be a whole number, 1 to 1,000,000,000"),
        ("[train]\nsteps = 1.0", "run.toml: train.steps = 1.0: must be a whole number, 1 to 1,000,000,000"),
        ("[train]\nsteps = '1'", 'run.toml: train.steps = "1": must be a whole number, 1 to 1,000,000,000'),
        ("[train]\nsteps = true", "run.toml: train.steps = true: must be a whole number, 1 to 1,000,000,000"),
        (
            "[train]\nseed = 4294967296",
            "run.toml: train.seed = 4294967296: must be a whole number, 0 to 4294967295",
        ),
        ("[train]\nout = ''", 'run.toml: train.out = "": must be a path, in quotes'),
        ("[train]\nout = 1979-01-01", "run.toml: train.out = 1979-01-01: must be a path, in quotes"),
        ("[data]\npath = 5", "run.toml: data.path = 5: must be a path, in quotes"),
        (
            "[model]\nkind = 1",
            "run.toml: model.kind = 1: must be gpt, bert, huggingface, or one of example, bert-48, ",
        ),
        ("[model]\ndropout = 1", "run.toml: model.dropout = 1: must be a number from 0 to less than 1"),
        ("[schedule]\nscheme = 1", "run.toml: schedule.scheme = 1: must be a name, in quotes"),
        ("[schedule]\nstages = '4'", 'run.toml: schedule.stages = "4": must be a whole number'),
        ("[schedule]\ninjected = [1]", 'run.toml: schedule.injected = [1]: must be a whole number, or "max"'),
        ("[schedule]\nstages = -2", "run.toml: schedule.stages = -2: must be 2 or more"),
        ("[pipeline]\nreplicas = 0", "run.toml: pipeline.replicas = 0: must be a whole number, 1 to 100,000"),
        (
            "[pipeline]\nsync = 'late'",
            'run.toml: pipeline.sync = "late": must be one of end, eager, eager-opt',
        ),
        ("[pipeline]\nrecompute = 1", "run.toml: pipeline.recompute = 1: must be one of none, stage, layer"),
        (
            "[pipeline]\ntransport = 'mpi'",
            'run.toml: pipeline.transport = "mpi": must be one of auto, gloo, nccl, local',
        ),
        (
            "[pipeline]\nautocast = 'float32'",
            'run.toml: pipeline.autocast = "float32": must be bfloat16 or float16, in quotes',
        ),
        (
            "[pipeline]\nautocast = 'float16'\n[schedule]\nscheme = 'pipedream'",
            "run.toml: schedule.scheme = pipedream updates each stage before all gradients are known, so "
            "that the loss scale of float16 cannot skip an update everywhere; take a synchronous scheme, or "
            "bfloat16",
        ),
        (
            "[pipeline]\nloss_scale = 3.0",
            "run.toml: pipeline.loss_scale = 3.0: must be a power of 2, 2**-126 to 2**127",
        ),
        ("[pipeline]\ncompile = 1", "run.toml: pipeline.compile = 1: must be true or false"),
        (
            "[pipeline]\nclip_norm = nan",
            "run.toml: pipeline.clip_norm = nan: must be a finite number, 0 or more",
        ),
        (
            "[pipeline]\ncuts = [1, '2']",
            'run.toml: pipeline.cuts = [1, "2"]: must be a list of whole numbers',
        ),
        ("[pipeline]\ncuts = 3", "run.toml: pipeline.cuts = 3: must be a list of whole numbers"),
        (
            "[pipeline]\ntimeout_seconds = 0",
            "run.toml: pipeline.timeout_seconds = 0: must be a number of seconds, more than 0, at most 1000",
        ),
        ("[optimizer]\nname = 'lion'", 'run.toml: optimizer.name = "lion": must be one of adamw, adam, sgd'),
        (
            "[optimizer]\nbetas = [0.9]",
            "run.toml: optimizer.betas = [0.9]: must be a list of 2 numbers, each from 0 to less than 1",
        ),
        (
            "[optimizer]\nlearning_rate = 0",
            "run.toml: optimizer.learning_rate = 0: must be a finite number, more than 0",
        ),
        (
            "[train]\nsamples = 2",
            "run.toml: train.samples = 2: cannot be cut into the 8 micro-batches of chimera",
        ),
    ],
)
def test_a_wrong_file(write: Write, text: str, message: str) -> None:
    said = refused(write(text))
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "train.steps",
            "--set train.steps: must have the form section.key=value, as in --set train.steps=100",
        ),
        ("steps=1", "--set steps=1: must have the form section.key=value, as in --set train.steps=100"),
        ("=1", "--set =1: must have the form section.key=value, as in --set train.steps=100"),
        ("train.steps=many", '--set train.steps = "many": must be a whole number, 1 to 1,000,000,000'),
        ("train.out=5", "--set train.out = 5: must be a path, in quotes"),
        ("train.a.b=1", "--set train.a.b: unknown key. Keys of train: "),
        ("modle.layers=1", "unknown section 'modle'; did you mean model? Sections: "),
    ],
)
def test_a_wrong_override(given: str, message: str) -> None:
    assert refused(None, given).startswith(message)


def test_a_wrong_flag_names_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"^--steps: train\.steps = 0: must be a whole number, 1 to 1,000,000,000$"
    ):
        load_config(steps=0)


def test_all_that_is_wrong_is_told_at_once(write: Write) -> None:
    path = write("[model]\nlayers = 0\n[train]\nsteps = 0\nseed = 1\n")
    assert refused(path, "train.seed=-1").splitlines() == [
        "3 things are wrong:",
        "run.toml: model.layers = 0: must be a whole number, 1 to 10,000",
        "run.toml: train.steps = 0: must be a whole number, 1 to 1,000,000,000",
        "--set train.seed = -1: must be a whole number, 0 to 4294967295",
    ]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "x").endswith("x: no such file")
    assert refused(tmp_path).endswith(": is a folder, not a config file")
    (tmp_path / "x").write_bytes(b"a\xff")
    assert refused(tmp_path / "x").endswith("x: is not a text file (byte 1 is not UTF-8)")
    (tmp_path / "y").write_text("z")
    assert refused(tmp_path / "y" / "z").endswith("z: cannot be read: Not a directory")


def test_a_long_value_is_cut(write: Write) -> None:
    said = refused(write(f"[train]\nsteps = '{'x' * 200}'"))
    assert said == f'run.toml: train.steps = "{"x" * 56}…: must be a whole number, 1 to 1,000,000,000'
