"""Users' models: profiled without glue, planned, and predicted with the profile's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import counterflow as cf
from counterflow.errors import ConfigError, CounterflowError
from counterflow.measure.folder_model import ModelFolder
from counterflow.measure.layer_costs import layers_with_loss, ties_of
from counterflow.measure.model_file import ModelFile
from counterflow.measure.model_profile import Measurement
from counterflow.measure.user_model import UserModel
from counterflow.planning import Configuration
from counterflow.planning.inputs import input_files
from counterflow.schedule.op import B, F
from counterflow.training.profiling import measure_file

from .test_equal_layers import Blocks

EXAMPLE = torch.ones(2, 4), torch.ones(2, 2)


def _profile(model: nn.Module | list[nn.Module], **options: Any) -> Measurement:
    return cf.profile(model, mse_loss, example=EXAMPLE, sizes=(1, 2), workers=1, repeats=1, **options)


@pytest.fixture(scope="module")
def measurement() -> Measurement:
    return _profile(Blocks(6))


def test_a_users_model_becomes_the_planners_files(measurement: Measurement, tmp_path: Path) -> None:
    model, profile = measurement.model, measurement.profile
    assert model.name == "Blocks"
    assert model.source == "cf.profile"
    assert model.optimizer_states == 2.0
    assert model.input_bytes == 4 * 4
    assert {*model.layers} == {*profile.layers}
    assert profile.sources["update_seconds_per_byte"] == "AdamW: measured, median"
    assert profile.layer("block").weights_bytes == 4 * (16 + 8 * 32 + 32 + 32 * 8 + 8)
    assert profile.layer("block").output_bytes == 4 * 8
    paths = measurement.save(tmp_path / "new")
    assert input_files.load_model(paths["model"]) == model
    assert input_files.load_profile(paths["profile"]) == profile
    assert input_files.load_cluster(paths["cluster"]) == measurement.cluster


def test_a_predicted_step_is_what_the_profile_adds_up_to(measurement: Measurement) -> None:
    """On one worker, a step is each layer's forward and backward, two ops, the update and the rest."""
    alone = Configuration.of("gpipe", {"stages": 1, "micro_batches": 1}, replicas=1, samples=2)
    model, profile = measurement.model, measurement.profile
    step = cf.predict(model, profile, measurement.cluster, alone)
    parts = [profile.layer(kind) for kind in model.layers]
    ops = sum(layer.seconds(kind, 2) for layer in parts for kind in (F, B))
    update = profile.update_seconds_per_byte * sum(layer.weights_bytes for layer in parts)
    rest = 2 * profile.op_overhead_seconds + profile.step_overhead_seconds
    assert step.step_seconds == pytest.approx(ops + update + rest)


def test_a_measurement_is_planned_and_its_best_plan_runs(measurement: Measurement) -> None:
    best = cf.plan(measurement, mini_batch=4, depths=(1,), samples=(2,), schemes=("gpipe",)).best[0]
    options = best.pipeline_options
    assert options == {"schedule": "gpipe(stages=1, micro_batches=2, groups=1)", "cuts": []}

    def train() -> float:
        pipeline = cf.Pipeline(Blocks(6), mse_loss, example=EXAMPLE[0], optimizer=torch.optim.SGD, **options)
        return pipeline.step(torch.ones(4, 4), torch.ones(4, 2)).loss or 0.0

    assert cf.launch(train, workers=1, transport="local")[0] > 0
    with pytest.raises(ConfigError, match="profile: given in addition to a measurement"):
        cf.plan(measurement, measurement.profile, mini_batch=4)


def test_the_model_is_not_changed() -> None:
    model = Blocks(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _profile(model)
    assert all(value.grad is None for value in model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_the_optimizer_is_the_users() -> None:
    result = _profile([nn.Linear(4, 2)], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert result.model.optimizer_states == 0.0
    assert result.profile.sources["update_seconds_per_byte"] == "SGD: measured, median"


def test_an_example_is_a_pair() -> None:
    with pytest.raises(ConfigError, match=r"example is a Tensor: give a mini-batch, inputs and targets"):
        cf.profile(Blocks(1), mse_loss, example=torch.ones(2, 4))  # type: ignore[arg-type]


_FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def make_model():
    return Net(), nn.MSELoss(), (torch.ones(6, 4), torch.ones(6, 2))


def sgd():
    return (*make_model(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def two():
    return Net(), nn.MSELoss()


def text():
    return "net", nn.MSELoss(), (torch.ones(6, 4), torch.ones(6, 2))


def fails():
    raise ValueError("no such width")


number = 5
"""


def test_a_file_makes_the_model(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(_FILE)
    file = ModelFile.parse(str(path))
    assert file == ModelFile(path)
    model = file.load()
    assert isinstance(model, UserModel)
    assert (type(model.model).__name__, model.samples, model.optimizer_name) == ("Net", 6, "AdamW")
    assert ModelFile(path, "sgd").load().optimizer_name == "SGD"
    assert len(file().layers) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("two", r"own\.py:two returns 2 values: it has to return model, loss, \(inputs, targets\)"),
        ("text", r"own\.py:text returns a str as its model"),
        ("fails", r"own\.py:fails fails \(ValueError: no such width\)"),
        ("number", r"own\.py has no function number: write def number\(\)"),
        ("absent", r"own\.py has no function absent: .* name another one: own\.py:FUNCTION"),
    ],
)
def test_wrong_functions_are_refused(tmp_path: Path, function: str, message: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(_FILE)
    with pytest.raises(ConfigError, match=message):
        ModelFile(path, function).load()


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.py: no such file"):
        ModelFile(tmp_path / "none.py").load()
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails \(ModuleNotFoundError: No module named"):
        ModelFile(broken).load()


def test_what_is_no_python_file() -> None:
    assert ModelFile.parse("gpt.toml") is None
    assert ModelFile.parse("folder") is None
    assert ModelFile.parse("a:b.py") == ModelFile(Path("a:b.py"))


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_transformers_folder_is_measured_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=1, eos_token_id=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    folder = ModelFolder(tmp_path)
    model = folder.load()
    assert isinstance(model.model, nn.Module)
    assert all(parameter.is_meta for parameter in model.model.parameters())
    assert model.example[0].shape == (8, 8)
    assert model.example[0].max() < 64
    measured, samples = measure_file(folder, sizes=(1,), workers=1, repeats=1)
    assert samples == 8
    weights = sum(measured.profile.layer(kind).weights_bytes for kind in measured.model.layers)
    assert weights == sum(parameter.nbytes for parameter in model.model.parameters())
    with pytest.raises(ConfigError, match=r"no causal language model of transformers \(.*FILE.py:make_model"):
        ModelFolder(tmp_path / "none").load()


class Routed(nn.Module):
    """A residual mixture of two experts with a balance loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.Parameter(torch.randn(2, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        shares = self.gate(x).softmax(-1)
        cf.add_loss(0.01 * shares.square().sum(-1).mean(), "balance")
        return x + torch.einsum("sw,ewv,se->sv", x, self.experts, shares)


def test_a_mixture_with_its_own_loss_is_profiled() -> None:
    parts = [nn.Linear(4, 8), *(Routed(8) for _ in range(5)), nn.Linear(8, 2)]
    result = _profile(parts)
    assert result.model.runs() == [("linear", 1), ("routed", 5), ("linear-2", 1)]
    assert result.profile.layer("routed").backward_seconds[0] > 0


def test_sizes_with_which_layers_raise_are_left_out() -> None:
    """A batch norm of vectors needs two samples of a micro-batch."""
    model, data = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)
    options: dict[str, Any] = {"example": (data, data), "workers": 1, "repeats": 1}
    measurement = cf.profile(model, mse_loss, sizes=(1, 2), **options)
    assert measurement.profile.min_samples == 2
    assert {layer.samples for layer in measurement.profile.layers.values()} == {(2.0,)}
    result = cf.plan(measurement, mini_batch=4)
    assert {plan.play.configuration.samples for plan in result.best} == {2, 4}
    reason = "layers raised an error with less than 2 samples"
    assert [omission.reason for omission in result.omissions if "micro-batch" in omission.what] == [reason]
    with pytest.raises(CounterflowError, match="Expected more than 1 value per channel"):
        cf.profile(model, mse_loss, sizes=(1,), **options)


class HeadLoss(nn.Module):
    """A loss with a head of its own, whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss over the samples."""
        return mse_loss(self.head(output), target[:, :1].expand(-1, 3))


def test_weights_of_a_loss_are_the_last_layers() -> None:
    parts, loss = [nn.Linear(4, 2), nn.Linear(2, 2), nn.Linear(2, 2)], HeadLoss()
    result = cf.profile(parts, loss, example=EXAMPLE, sizes=(1, 2), workers=1, repeats=1)
    last = result.profile.layer(result.model.layers[-1])
    assert last.parameter_bytes == (16.0, 8.0, 24.0)
    assert (last.weights_bytes, last.frozen_bytes) == (60.0, 12.0)
    assert [result.profile.layer(kind).weights_bytes for kind in result.model.layers[:-1]] == [40.0, 24.0]
    loss.head.weight = parts[0].weight = nn.Parameter(torch.ones(2, 4))
    assert [tie.layers for tie in ties_of(layers_with_loss(parts, loss))] == [(0, 2)]
