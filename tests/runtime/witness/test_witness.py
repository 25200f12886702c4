"""The model's own forward as a witness: it agrees with every scheme and option, and names what differs."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.runtime.assembly.recordings import Recordings
from counterflow.runtime.stages.evaluation_mode import evaluating
from counterflow.runtime.witness.rounds import packed, unpacked
from counterflow.runtime.witness.sketches import CallKey, CallSketch, first_difference, sketches_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.2)
        self.norm: nn.Module = nn.BatchNorm1d(width)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        drawn: Tensor = self.dropout(torch.tanh(self.norm(self.linear(x))))
        return x + self.gain * drawn


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 3)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.dropout(x + self.position, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits / self.temperature


def pipeline_of(model: nn.Module, scheme: str, **options: Any) -> tuple[cf.Pipeline, Tensor, Tensor]:
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return cf.Pipeline(model, nn.CrossEntropyLoss(), scheme, optimizer=sgd, example=x, **options), x, y


def trained(scheme: str, **options: Any) -> tuple[list[float], list[str]]:
    """Losses of five steps with evaluations, and the warnings of the witness."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("counterflow.runtime.witness")
    logger.addHandler(handler)
    try:
        torch.manual_seed(0)
        model = Net()
        if "compute_dtype" in options:  # torch's batch norms do not mix dtypes
            for block in model.blocks:
                block.norm = nn.Identity()
        pipeline, x, y = pipeline_of(model, scheme, **options)
        pipeline.predict(x)
        losses = [pipeline.step(x, y).loss for _ in range(5)]
        losses += [step.loss for step in pipeline.flush()]
        losses.append(pipeline.evaluate(x, y).loss)
        return losses, warnings
    finally:
        logger.removeHandler(handler)


SCHEMES = {
    "gpipe(stages=1, micro_batches=1)": 1,
    "dapple(stages=2, micro_batches=3)": 2,
    "zb-v(workers=2, micro_batches=3)": 2,
    "chimera(stages=2, micro_batches=2)": 2,
    "chimera(stages=2, micro_batches=4, concat=backward-halving)": 2,
    "hanayo(workers=2, micro_batches=2, waves=1)": 2,
    "pipedream(stages=2)": 2,
    "pipedream-2bw(stages=2, micro_batches=2)": 2,
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_agrees_and_changes_no_number(scheme: str) -> None:
    workers = SCHEMES[scheme]
    (compared, warnings), *_ = cf.launch(partial(trained, scheme), workers=workers)
    (alone, _), *_ = cf.launch(partial(trained, scheme, witness_every=0), workers=workers)
    assert torch.equal(torch.tensor(compared).nan_to_num(), torch.tensor(alone).nan_to_num())
    assert warnings == []


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "stage"},
        {"recompute": "layer"},
        {"autocast": "bfloat16"},
        {"compute_dtype": "bfloat16"},
        {"barrier": False},
        {"compress": True},
        {"deferred_batch_norm": True},
    ],
    ids=str,
)
def test_it_agrees_under_options(options: dict[str, Any]) -> None:
    scheme = "dapple(stages=2, micro_batches=3)"
    (losses, warnings), *_ = cf.launch(partial(trained, scheme, **options), workers=2)
    (alone, _), *_ = cf.launch(partial(trained, scheme, witness_every=0, **options), workers=2)
    assert torch.equal(torch.tensor(losses).nan_to_num(), torch.tensor(alone).nan_to_num())
    assert warnings == []


def test_it_agrees_between_processes_and_replicas() -> None:
    scheme = "dapple(stages=2, micro_batches=3)"
    (losses, warnings), *_ = cf.launch(partial(trained, scheme), workers=4, transport="gloo")
    assert len(losses) == 6
    assert warnings == []


def bypassed(change: Callable[[Net], object], scheme: str, kind: type[Net] = Net) -> None:
    """Train with a change between steps that records do not see."""
    torch.manual_seed(0)
    model = kind()
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    layers = cf.layers(model, x)
    with pytest.MonkeyPatch.context() as patch:
        blind(patch)
        pipeline = cf.Pipeline(
            model,
            nn.CrossEntropyLoss(),
            scheme,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            list_layers=lambda _: layers,
        )
        pipeline.step(x, y)
        change(model)
        for _ in range(3):
            pipeline.step(x, y)


def blind(patch: pytest.MonkeyPatch) -> None:
    """Let guards of recordings see nothing, so that the witness is alone."""
    patch.setattr(Recordings, "follow", lambda *_, **__: None)


def set_temperature(model: Net) -> None:
    model.temperature = 3.0


def set_gain(model: Net) -> None:
    model.blocks[1].gain = 0.1  # type: ignore[assignment]


def register_hook(model: Net) -> None:
    model.blocks[1].register_forward_hook(lambda _, __, output: output * 3)


def replace_block(model: Net) -> None:
    model.blocks[1] = nn.Identity()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (set_temperature, "its layers agree, and what comes after them does not"),
        (set_gain, "at its call of 'blocks.2.linear'"),
        (register_hook, "at its call of 'blocks.2.linear'"),
        (replace_block, "at its call of 'blocks.1.linear', which the model's forward does not make"),
    ],
)
def test_a_change_between_steps_is_named(change: Callable[[Net], object], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cf.launch(partial(bypassed, change, "dapple(stages=2, micro_batches=3)"), workers=2)
    assert "the Net's own forward and the pipeline give micro-batch" in str(caught.value)
    assert place in str(caught.value)


def test_a_change_while_mini_batches_are_in_flight_is_named() -> None:
    with pytest.raises(ConfigError, match="they differ first in the input of layer"):
        cf.launch(partial(bypassed, set_gain, "pipedream(stages=2)"), workers=2)


class _Doubling(nn.Linear):
    """A module whose class calls torch's ``__call__`` in one of its own."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 2 + 1


class _DoublingBlock(Block):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) / 2


class _DoublingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_DoublingBlock(8) for _ in range(4))
        for block in self.blocks:
            block.linear = _Doubling(8, 8)


def test_a_call_of_a_class_runs_once() -> None:
    def work() -> None:
        torch.manual_seed(0)
        model = _DoublingNet()
        kinds = [type(module) for module in model.modules()]
        pipeline, x, y = pipeline_of(model, "dapple(stages=2, micro_batches=3)")
        pipeline.predict(x)
        pipeline.step(x, y)
        pipeline.evaluate(x, y)
        assert [type(module) for module in model.modules()] == kinds

    cf.launch(work, workers=2, transport="local")


def test_a_change_after_a_call_of_a_class_is_named() -> None:
    work = partial(bypassed, set_gain, "gpipe(workers=1, micro_batches=3)", _DoublingNet)
    with pytest.raises(ConfigError, match=r"they differ first .* at its call of 'blocks\.2\.linear'"):
        cf.launch(work, workers=1, transport="local")


def test_it_says_that_it_is_turned_off() -> None:
    job = partial(trained, "gpipe(stages=1, micro_batches=1)", witness_every=0)
    ((_, warnings),) = cf.launch(job, workers=1)
    assert warnings == ["witness_every = 0: no step is compared with the model's own forward"]


def due_steps() -> list[int]:
    pipeline, _, _ = pipeline_of(Net(), "gpipe(stages=1, micro_batches=1)", witness_every=12)
    return [number for number in range(1, 40) if pipeline._engine.witness.due(training=True)]


def test_steps_that_are_compared() -> None:
    assert cf.launch(due_steps, workers=1) == [[1, 2, 4, 8, 12, 24, 36]]


def test_the_first_call_that_differs_is_named() -> None:
    ones, twos = sketches_of(torch.ones(3)), sketches_of(torch.full((3,), 2.0))
    keys = CallKey("a", 0, 0), CallKey("b", 1, 0)
    ours = {keys[0]: CallSketch(ones, ones), keys[1]: CallSketch(ones, ones)}
    other = {**ours, keys[1]: CallSketch(ones, twos)}
    assert first_difference(keys, ours, ours, 1e-6) == ""
    assert first_difference(keys, ours, other, 1e-6) == (
        "they differ first in the output of layer 1 at its call of 'b'"
    )
    assert first_difference(keys, ours, {keys[0]: ours[keys[0]]}, 1e-6).endswith(
        "'b', which only the model's forward makes"
    )
    swapped = sketches_of(torch.tensor([2.0, 1.0])), sketches_of(torch.tensor([1.0, 2.0]))
    assert not swapped[0][0].near(swapped[1][0], 1e-6)


class _Counts(nn.Module):
    """A block whose first calls count more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = x + self.linear(x) / min(self.calls, 20)
        return output


class _CountingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_Counts() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_state_between_forwards_is_named_if_no_option_runs_layers_otherwise() -> None:
    def work() -> None:
        pipeline, x, y = pipeline_of(_CountingNet(), "gpipe(workers=1, micro_batches=4)")
        for _ in range(2):
            pipeline.step(x, y)

    with pytest.raises(ConfigError, match="it counts its calls, for instance"):
        cf.launch(work, workers=1, transport="local")


class _Placed(Net):
    """Makes tensors on the device of weights, which other workers have."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = cast("Any", self.blocks[0]).linear.weight
        places = torch.arange(x.shape[1], device=next(self.parameters()).device) / 10
        gain = 1.0 if weight.is_meta else 0.5 + 0.0 * weight.get_device()
        return super().forward(x + gain * places.to(weight.device))


@pytest.mark.parametrize(
    "scheme", ["dapple(stages=2, micro_batches=4)", "chimera(stages=4, micro_batches=4)"]
)
def test_weights_of_other_workers_are_on_the_workers_device(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> list[float]:
        torch.manual_seed(0)
        pipeline, x, y = pipeline_of(_Placed(), scheme)
        return [pipeline.step(x, y).loss for _ in range(2)]

    with caplog.at_level(logging.WARNING):
        results = cf.launch(work, workers=int(scheme[scheme.index("=") + 1]), transport="local")
    assert len({tuple(losses) for losses in results}) == 1
    assert not caplog.messages  # it was compared


def test_an_evaluation_waits_until_the_models_modes_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with one model: the worker that compares sets modes of modules of the other one, too."""

    @contextmanager
    def late(modules: Iterable[nn.Module]) -> Iterator[None]:
        with evaluating(modules):
            yield
            time.sleep(0.05)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                time.sleep(0.1)
            return x

    monkeypatch.setattr("counterflow.runtime.witness.witness.evaluating", late)
    model = Net()
    model.blocks[0] = nn.Sequential(Slow(), nn.Dropout(0.5), nn.Linear(8, 8))

    def work() -> list[float]:
        torch.manual_seed(0)
        pipeline, x, y = pipeline_of(model, "dapple(stages=2, micro_batches=4)")
        return [pipeline.evaluate(x, y).loss for _ in range(3)]

    first, second, third = cf.launch(work, workers=2, transport="local")[0]
    assert first == second == third  # the third is not compared


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(3, 2).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.empty(0, 2),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.layout}-{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_between_processes_keep_their_values(tensor: Tensor) -> None:
    found = unpacked(pickle.loads(pickle.dumps(packed({"x": [tensor]}))), torch.device("cpu"))["x"][0]
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    torch.testing.assert_close(found, tensor, rtol=0, atol=0)


def test_whether_a_tensor_requires_a_gradient_travels_too() -> None:
    tensor = torch.ones(2, requires_grad=True)
    found = unpacked(pickle.loads(pickle.dumps(packed(tensor))), torch.device("cpu"))
    assert found.requires_grad
    assert not found.is_leaf
