"""The two records of options: what is legal, what is refused and how, and what all places know of them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import counterflow as cf
from counterflow.common.options import Options, metadata
from counterflow.execution import Batching, Configured, Execution, Flat, records
from counterflow.planning import Model
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.modes import Recompute, Sync
from counterflow.training import load_config

EVERY = [*Execution.model_fields.items(), *Batching.model_fields.items()]


def test_every_option_is_described_and_says_what_is_legal() -> None:
    for name, info in EVERY:
        assert info.description, name
        assert metadata(info, "legal"), name
    for record in (Execution, Batching, Configured):
        assert record() == record(**{name: getattr(record(), name) for name in record.model_fields})


def test_keywords_are_the_fields() -> None:
    assert [*Flat.__annotations__] == [name for name, _ in EVERY]


def test_values_come_in_one_form() -> None:
    given: dict[str, Any] = {"recompute": "layer", "sync": "end", "autocast": torch.bfloat16, "clip_norm": 1}
    found = Execution(**given)
    assert (found.recompute, found.sync, found.autocast) == (Recompute.LAYER, Sync.END, "bfloat16")
    assert found == Execution(recompute=Recompute.LAYER, sync=Sync.END, autocast="bfloat16", clip_norm=1.0)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"zero_stage": 2},
            "zero_stage = 2: must be a whole number, 0 to 1 (1: one of the workers that hold a weight "
            "keeps its optimiser state, updates the weight and sends it to the others (ZeRO stage 1))",
        ),
        ({"zero_stage": True}, "zero_stage = True: must be a whole number, 0 to 1 (1: one of the"),
        (
            {"recompute": "all"},
            "recompute = 'all': must be one of none, stage, layer (what is computed again for a backward",
        ),
        ({"clip_norm": -1.0}, "clip_norm = -1.0: must be a number, 0 or more (maximum norm of the whole"),
        ({"barrier": 1}, "barrier = 1: must be true or false (whether steps end on all workers"),
        ({"autocast": torch.float32}, "autocast = torch.float32: must be bfloat16 or float16, in quotes"),
        ({"loss_scale": 3.0}, "loss_scale = 3.0: must be a power of 2, 2**-126 to 2**127 (first factor of"),
        ({"loss_scale": 0.0}, "loss_scale = 0.0: must be a power of 2"),
        ({"loss_scale": float("inf")}, "loss_scale = inf: must be a power of 2"),
        ({"loss_scale_interval": 0}, "loss_scale_interval = 0: must be a whole number, 1 to 1,000,000,000"),
        ({"timeout_seconds": 0}, "timeout_seconds = 0: must be a number of seconds, more than 0"),
        ({"barier": False}, "barier: Execution has no such option; did you mean barrier?"),
    ],
)
def test_what_is_not_legal_is_refused_in_a_sentence(given: dict[str, Any], told: str) -> None:
    with pytest.raises(cf.ConfigError) as caught:
        Execution(**given)
    assert str(caught.value).startswith(told)


def test_records_and_keywords_go_together() -> None:
    execution, batching = records(Execution(barrier=False), None, {"clip_norm": 2.0, "input_dims": 1})
    assert (execution.barrier, execution.clip_norm, batching.input_dims) == (False, 2.0, 1)
    assert records(None, None, {}) == (Execution(), Batching())
    given = Configured(zero_stage=1)
    assert records(given, None, {})[0] is given


def test_a_section_of_a_config_is_an_execution_without_its_further_keys() -> None:
    section = load_config(None).pipeline
    assert type(records(section, None, {})[0]) is Execution
    layers = [torch.nn.Linear(2, 2)]
    loss, optimizer = torch.nn.functional.mse_loss, torch.optim.SGD
    batch = torch.ones(2, 2, device="meta")
    schedule = "gpipe(stages=1, micro_batches=2)"
    counted = cf.memory(layers, loss, schedule, batch, batch, optimizer=optimizer, execution=section)
    assert len(counted.workers) == 1


@pytest.mark.parametrize(
    ("flat", "told"),
    [
        ({"clip_norm": 2.0}, "clip_norm is given twice: 2.0, and 1.0 in execution; give it once"),
        ({"input_dims": 0}, "input_dims is given twice: 0, and 1 in batching; give it once"),
        ({"clip": 2.0}, "clip: unknown option; did you mean clip_norm?"),
        ({"optimiser": 1}, "optimiser: unknown option; did you mean optimizer?"),
    ],
)
def test_what_is_given_twice_or_unknown_is_refused(flat: dict[str, Any], told: str) -> None:
    with pytest.raises(cf.ConfigError) as caught:
        records(Execution(clip_norm=1.0), Batching(input_dims=1), flat, ["optimizer"])
    assert str(caught.value).startswith(told)


def test_another_record_is_refused() -> None:
    wrong: Any = {"clip_norm": 1.0}
    with pytest.raises(cf.ConfigError, match=r"must be a cf\.Execution"):
        records(wrong, None, {})


def _make(name: str, one: Options, other: Options) -> None:
    """A pipeline of each worker's own record."""
    chosen: dict[str, Any] = {name: other if current_transport().rank else one}
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    cf.Pipeline(layers, torch.nn.MSELoss(), cf.schemes.gpipe(2, 2), optimizer=torch.optim.Adam, **chosen)


OTHER: dict[str, Any] = {
    "recompute": "stage",
    "sync": "end",
    "gradient_compression": "int8",
    "op_times": ((0.0,) * 8, (1.0,) * 8),
    "autocast": "bfloat16",
    "compute_dtype": "bfloat16",
    "loss_scale": 8.0,
    "clip_norm": 1.0,
    "zero_stage": 1,
    "digest_every": 7,
    "sequence_dims": 0,
    "kwarg_sequence_dims": 0,
    "target_sequence_dims": 0,
}
"""Another value than the default; of flags it is the other one, of dimensions 1."""


@pytest.mark.parametrize("record", [Execution, Batching])
def test_what_would_train_otherwise_is_compared_by_worker(record: type[Options]) -> None:
    for name in record().agreed():
        usual = getattr(record(), name)
        other = OTHER.get(name, not usual if isinstance(usual, bool) else 1)
        with pytest.raises(cf.ConfigError, match=f"rank 0 was given {name} = "):
            cf.launch(
                _make,
                record.__name__.lower(),
                record(),
                record(**{name: other}),
                workers=2,
                transport="local",
                timeout_seconds=20,
            )


def test_a_plan_reads_the_record() -> None:
    plain = Model("plain", ("block",))
    assert (plain.barrier, plain.clips, plain.shards_state, plain.message_share) == (True, True, False, 1.0)
    table = {"barrier": False, "clip_norm": 0.0, "compress": True, "replicas": 2}
    other = Model("other", ("block",), config={"pipeline": table})
    assert (other.barrier, other.clips, other.message_share) == (False, False, 0.5)


def test_a_pipeline_refuses_an_option_before_anything_starts() -> None:
    wrong: dict[str, Any] = {"clip": 1.0}
    with pytest.raises(cf.ConfigError, match="clip: unknown option; did you mean clip_norm"):
        cf.Pipeline([], None, cf.schemes.gpipe(2, 2), optimizer=torch.optim.Adam, **wrong)
