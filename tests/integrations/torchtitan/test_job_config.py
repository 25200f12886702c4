"""torchtitan's pipeline keys as a config: stages as torchtitan makes them, and what is refused or noted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterflow.errors import ConfigError
from counterflow.integrations.torchtitan.job_config import Translated, from_torchtitan
from counterflow.schedule.layouts import LayerKind, Layout
from counterflow.training import load_config


def job(keys: str, batch: int = 8) -> str:
    return f"[training]\nlocal_batch_size = {batch}\n[parallelism]\ndata_parallel_shard_degree = 1\n{keys}"


def translated(keys: str, layers: int | None = None, batch: int = 8) -> Translated:
    return from_torchtitan(job(keys, batch), layers, name="job.toml")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("1F1B", {"scheme": "dapple", "stages": 2}),
        ("gpipe", {"scheme": "gpipe", "stages": 2}),
        ("Interleaved1F1B", {"scheme": "interleaved", "workers": 2, "chunks": 2}),
        ("LoopedBFS", {"scheme": "gpipe", "stages": 2, "groups": 2}),
        ("InterleavedZeroBubble", {"scheme": "interleaved-zb", "workers": 2, "chunks": 2}),
        ("ZBVZeroBubble", {"scheme": "zb-v", "workers": 2}),
        ("DualPipeV", {"scheme": "dualpipe-v", "workers": 2}),
    ],
)
def test_every_schedule_makes_a_config_that_builds(
    name: str, scheme: dict[str, object], tmp_path: Path
) -> None:
    found = translated(f'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "{name}"', layers=6)
    assert found.sections["schedule"] == {**scheme, "micro_batches": 8}
    assert found.notes == ()
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers = 6\n" + found.to_toml(), encoding="utf-8")
    config = load_config(path)
    built = config.build_schedule()
    assert found.layout is not None
    assert (built.workers, built.stages) == (2, len(found.layout.stages))
    assert config.pipeline.cuts == str(found.layout)


@pytest.mark.parametrize(
    ("keys", "layers", "layout"),
    [
        # as torchtitan's own tests have it: 8 layers, embedding and head counted as one each
        ("pipeline_parallel_degree = 4", 8, "Ett|t*3|tt|tL"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 5", 8, "Et*4|t*4,L"),
        (
            'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
            "pipeline_parallel_layers_per_stage = 2\npipeline_parallel_first_stage_less_layers = 0\n"
            "pipeline_parallel_last_stage_less_layers = 0",
            8,
            "Ett|tt|tt|ttL",
        ),
        (
            "pipeline_parallel_degree = 3\nmodule_fqns_per_model_part = [['tok_embeddings', 'layers.0'], "
            "['layers.1', 'layers.2'], ['norm', 'output']]",
            None,
            "Et|tt|L",
        ),
        ("pipeline_parallel_degree = 2\npipeline_parallel_split_points = ['layers.4']", 6, "Et*4|ttL"),
        ("pipeline_parallel_degree = 3\npipeline_parallel_split_points = 'layers.4, norm'", 6, "Et*4|tt|L"),
        ("", 6, "Et*6,L"),
    ],
)
def test_stages_are_torchtitans(keys: str, layers: int | None, layout: str) -> None:
    assert str(translated(keys, layers).layout) == layout


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_layers_are_dealt_out_as_there(degree: int, layers: int, first: int, last: int) -> None:
    keys = (
        f"pipeline_parallel_degree = {degree}\npipeline_parallel_first_stage_less_layers = {first}\n"
        f"pipeline_parallel_last_stage_less_layers = {last}"
    )
    try:
        found = translated(keys, layers).layout
    except ConfigError:
        assert degree > 1
        assert max(first, last, 1) > (layers + first + last) // degree
        return
    assert found is not None
    counts = [stage.count(LayerKind.TRANSFORMER) for stage in found.stages]
    assert sum(counts) == layers
    if degree > 1:
        loads = [counts[0] + first, *counts[1:-1], counts[-1] + last]
        assert loads == sorted(loads, reverse=True)
        assert loads[0] - loads[-1] <= 1


def test_old_files_and_micro_batches() -> None:
    text = (
        "[training]\nbatch_size = 32\n[experimental]\npipeline_parallel_degree = 4\n"
        "pipeline_parallel_microbatch_size = 2\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
        "data_parallel_shard_degree = 4"
    )
    found = from_torchtitan(text, 6)
    assert found.sections == {
        "schedule": {"scheme": "dapple", "stages": 4, "micro_batches": 16},
        "pipeline": {"replicas": 8, "cuts": "Et|tt|tt|tL"},
        "train": {"samples": 32},
    }


def test_a_schedule_file_is_kept() -> None:
    keys = (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "PipelineScheduleMulti"\n'
        'pipeline_parallel_schedule_csv = "mine.csv"'
    )
    found = translated(keys, layers=6)
    assert found.sections["schedule"] == {"file": "mine.csv"}
    assert found.layout == Layout.read("Et|tt|tt|tL")
    assert found.notes == (
        "pipeline_parallel_schedule_csv: the file fixes the micro-batches; it must have 8",
    )


def test_what_is_left_out_is_noted() -> None:
    found = from_torchtitan(
        "[training]\nglobal_batch_size = 64\n[parallelism]\npipeline_parallel_degree = 2\n"
        "pipeline_parallel_shedule = 'GPipe'\ntensor_parallel_degree = 8\n"
        "pipeline_parallel_expert_parallel_overlap = true"
    )
    told = "\n".join(found.notes)
    assert "cuts" not in found.sections["pipeline"]
    assert "parallelism.pipeline_parallel_shedule: no such key of torchtitan is known; it is left out" in told
    assert "did you mean 'pipeline_parallel_schedule'?" in told
    assert "parallelism.tensor_parallel_degree = 8: no key of a pipeline, so it is left out" in told
    assert "parallelism.pipeline_parallel_expert_parallel_overlap: there is no such overlap here" in told
    assert "data_parallel_shard_degree = -1: takes what ranks are left; set pipeline.replicas so" in told
    assert "training.global_batch_size = 64: gradients of several steps add up there" in told
    assert "need the number of layers: give --layers, or cuts are balanced" in told


@pytest.mark.parametrize(
    ("keys", "layers", "told"),
    [
        (
            "pipeline_parallel_degree = 0",
            6,
            "parallelism.pipeline_parallel_degree = 0: must be a whole number, 1",
        ),
        ("pipeline_parallel_degree = '2'", 6, 'pipeline_parallel_degree = "2": must be a whole number, 1'),
        ("pipeline_parallel_schedule = 3", 6, "pipeline_parallel_schedule = 3: must be a text"),
        (
            "pipeline_parallel_schedule = '1F2B'",
            6,
            "no schedule of torch's that is known here; did you mean '1F1B'",
        ),
        (
            "pipeline_parallel_schedule = 'PipelineScheduleMulti'",
            6,
            "no schedule of torch's that is known here",
        ),
        (
            "pipeline_parallel_microbatch_size = 3",
            6,
            "local_batch_size = 8: must be a multiple of pipeline_para",
        ),
        ("pipeline_parallel_degree = 9", 6, "expected 1 or more and no less than either counts as"),
        (
            "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 2",
            6,
            "makes 4 stages, expected 2 for",
        ),
        (
            "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
            "pipeline_parallel_layers_per_stage = 2",
            None,
            "layers_per_stage = 2: makes as many stages as the number of layers says; give --layers",
        ),
        (
            "module_fqns_per_model_part = 3",
            6,
            "module_fqns_per_model_part = 3: must be a list of lists of names",
        ),
        (
            "module_fqns_per_model_part = [['rope']]",
            6,
            'part 0 has "rope", expected tok_embeddings, layers.N',
        ),
        (
            "pipeline_parallel_degree = 2\n"
            "module_fqns_per_model_part = [['tok_embeddings', 'layers.0', 'norm'], ['output']]",
            1,
            "part 0 has norm without output, which are one layer here",
        ),
        (
            "module_fqns_per_model_part = [['tok_embeddings', 'layers.1', 'norm', 'output']]",
            None,
            "has layers [1], expected all from 0 on, in order",
        ),
        (
            "pipeline_parallel_split_points = ['layers.9']",
            6,
            "must rise, and name layers of the 6 that there are",
        ),
        ("pipeline_parallel_split_points = ['tok']", 6, '"tok" begins no stage here; give layers.N or norm'),
        (
            "pipeline_parallel_split_points = 7",
            6,
            "pipeline_parallel_split_points = 7: must be a list of names",
        ),
        ("", 0, "layers=0: must be 1 to 10,000"),
    ],
)
def test_what_torchtitan_would_refuse_is_refused(keys: str, layers: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        translated(keys, layers)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[parallelism", "job.toml: no TOML: "),
        ("parallelism = 1", "job.toml: parallelism = 1: must be a section"),
        ("training = 1", "job.toml: training = 1: must be a section"),
        ("[parallelism]\ndata_parallel_shard_degree = 0", "data_parallel degrees are 1 and 0: must be whole"),
    ],
)
def test_what_is_no_job_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_torchtitan(text, 6, name="job.toml")
