"""Layers that are found automatically are the model: in both modes, for other sizes, in stages."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.capture.layer import CapturedLayer
from counterflow.capture.record import Record
from counterflow.capture.recorder import Recorder

from .kit import Decides, Net, Residuals, Tied


def sample(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def ids(number: int, *shape: int) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(number))


def same(model: nn.Module, layers: list[CapturedLayer], *inputs: Any, kwargs: Any = None) -> None:
    for training in (True, False):
        model.train(training)
        for value in inputs:
            assert cf.same_model(model, layers, value, kwargs=kwargs).ok


def test_what_is_between_modules_is_in_a_layer() -> None:
    model = Residuals()
    layers = cf.layers(model, sample(0, 4, 4))
    assert len(layers) >= 5
    same(model, layers, sample(0, 4, 4), sample(1, 7, 4), sample(2, 2, 4))


class Adds(nn.Module):
    """Adds losses within its blocks, and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residuals(blocks=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["features"][:, :4]
            cf.add_loss(x.square().mean(), "size")
        return x


def test_what_is_added_to_the_loss_is_added_in_layers() -> None:
    model, inputs = Adds(), torch.rand(6, 4)
    layers = cf.layers(model, inputs)
    assert cf.same_model(model, layers, inputs).ok
    with cf.added_losses() as expected:
        model.eval()(inputs)
    with cf.added_losses() as added:
        nn.Sequential(*layers).eval()(inputs)
    assert added.keys() == expected.keys() == {"size"}
    assert torch.allclose(added["size"], expected["size"])


def test_skip_connections_and_several_arguments() -> None:
    model = Net()
    layers = cf.layers(model, (sample(0, 2, 3, 8, 8), sample(1, 2)))
    assert len(layers) >= 6
    same(model, layers, (sample(0, 2, 3, 8, 8), sample(1, 2)), (sample(2, 3, 3, 8, 8), sample(3, 3)))


def test_keyword_arguments() -> None:
    model = Net()
    layers = cf.layers(model, sample(0, 2, 3, 8, 8), kwargs={"time": sample(1, 2), "scale": 0.5})
    same(model, layers, sample(0, 2, 3, 8, 8), kwargs={"time": sample(1, 2), "scale": 0.5})
    by_name = cf.layers(model, {"time": sample(1, 2), "image": sample(0, 2, 3, 8, 8)})
    same(model, by_name, {"image": sample(0, 3, 3, 8, 8), "time": sample(1, 3)})


def test_ties_buffers_lengths_and_unused_weights() -> None:
    model = Tied()
    layers = cf.layers(model, (ids(0, 3, 7), torch.ones(3, 7, dtype=torch.int64)))
    for shape in ((3, 7), (2, 5), (1, 12)):
        same(model, layers, (ids(1, *shape), torch.ones(shape, dtype=torch.int64)))
    assert layers[0].get_parameter("words.weight") is model.words.weight
    assert any(p is model.words.weight for p in layers[-1].parameters())
    assert any(p is model.unused.weight for p in layers[-1].parameters())


def test_a_module_is_called_in_the_mode_it_is_in() -> None:
    model = Residuals()
    model.blocks[1].eval()
    layers = cf.layers(model, sample(0, 4, 4))
    assert cf.same_model(model, layers, sample(0, 4, 4)).ok


def test_nothing_of_the_model_changes() -> None:
    model = Residuals()
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    cf.layers(model, sample(0, 4, 4))
    assert [type(module) for module in model.modules()] == kinds
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Residuals()
    model.table = torch.arange(8.0)
    assert len(cf.layers(model, sample(0, 4, 4))) >= 5


def test_a_forward_that_decides_by_numbers_is_refused_with_its_line() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"decides by a tensor's values .*kit\.py:\d+: if x\.mean\(\) > 0:"
    ):
        cf.layers(Decides(), sample(0, 4, 4))


def test_a_module_that_decides_by_numbers_is_refused_with_its_line() -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry, self.decides, self.head = nn.Linear(4, 4), Decides(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.decides(self.entry(x)))  # type: ignore[no-any-return]

    # What such a module gives is not known without its numbers.
    with pytest.raises(cf.ConfigError, match=r"forward of 'decides' decides by a tensor's values .*kit\.py"):
        cf.layers(Within(), sample(0, 4, 4))


class Functional(nn.Module):
    """Computes with its parts' weights and calls none of them, as torchvision's attention in windows does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        value = functional.linear(x, self.one.weight, self.one.bias).relu()
        return functional.linear(value, self.other.weight, self.other.bias)


def test_a_module_whose_weights_layers_use_is_not_missing() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(16), Functional()) for _ in range(3)), nn.Linear(16, 2)
    )
    wrapped = Wrapped(model)
    layers = cf.layers(wrapped, sample(0, 4, 16))
    assert not any(isinstance(module, Functional) for layer in layers for module in layer.modules())
    assert cf.same_model(wrapped, layers, sample(0, 4, 16)).ok


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for part in self.inner:  # type: ignore[attr-defined]
            x = part(x)
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class Opaque(nn.Module):
    """Has a part that cannot be followed, and a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.part = Part(how)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))  # type: ignore[no-any-return]


class Part(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.one(x)
        mean: Any = self.mean
        if self.how == "function":
            value = Doubled.apply(value)  # type: ignore[no-untyped-call]
        elif self.how == "attribute":
            self.calls += 1
        elif self.how == "buffer":
            mean.copy_(value.detach().mean(0))
        elif self.how == "hook":
            value.register_hook(lambda gradient: gradient * 2)
        return self.other(value)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["function", "attribute", "buffer", "hook"])
def test_what_no_step_can_say_is_left_to_the_module(how: str) -> None:
    model = Opaque(how)
    layers = cf.layers(model, sample(0, 4, 6))
    assert layers[0].get_submodule("part") is model.part
    same(model, layers, sample(0, 4, 6))


class Switches(nn.Module):
    """Changes an attribute of a module for one of its calls."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name, self.value = name, value
        self.part, self.head = Part("nothing"), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        before = getattr(self.part.one, self.name, None)
        setattr(self.part.one, self.name, self.value)
        output: Tensor = self.part(x)
        setattr(self.part.one, self.name, before)
        return self.head(output)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "value"), [("_adapters", "off"), ("training", None), ("scaling", 2.0)])
def test_a_module_that_is_switched_for_a_call_is_refused(name: str, value: Any) -> None:
    """The layers call the module as it is, and would not switch it."""
    with pytest.raises(
        cf.ConfigError, match=rf"changes the attribute '{name}' of 'part.one', which it calls .*test_layers"
    ):
        cf.layers(Switches(name, value), sample(0, 4, 6))


class Walks(nn.Module):
    """Loops over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.state = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for position in range(x.shape[1]):
            state = torch.tanh(self.own(x[:, position]) + self.state(state))
        return x + state[:, None]


def test_modules_that_loop_over_positions_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one: the model runs as often for six of them as for two."""
    runs: list[int] = []
    run = Recorder.run

    def counted(self: Recorder) -> Record:
        runs[-1] += 1
        return run(self)

    monkeypatch.setattr(Recorder, "run", counted)
    for walks in 2, 6:
        runs.append(0)
        model = nn.Sequential(nn.Embedding(11, 4), *(Walks() for _ in range(walks)))
        layers = cf.layers(model, ids(0, 3, 5))
        assert len(layers) >= walks
        same(model, layers, ids(0, 3, 5), ids(1, 2, 4))
    assert runs[0] == runs[1]


def test_hooks_of_modules_run() -> None:
    model = Residuals()
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    layers = cf.layers(model, sample(0, 4, 4))
    assert not seen
    value: Any = sample(0, 4, 4)
    for layer in layers:
        value = layer(value)
    assert seen == [1]


def test_other_kinds_of_mini_batches_are_refused() -> None:
    model = Net()
    layers = cf.layers(model, (sample(0, 2, 3, 8, 8), sample(1, 2)))
    with pytest.raises(cf.ConfigError, match=r"shape \(2, 3, 16, 16\) but .* has \(any a, 3, 8, 8\)"):
        layers[0]((sample(0, 2, 3, 16, 16), sample(1, 2)))
    with pytest.raises(cf.ConfigError, match=r"another structure \(Tensor\) than"):
        layers[0](sample(0, 2, 3, 8, 8))
    with pytest.raises(cf.ConfigError, match="give one of them"):
        cf.Pipeline(
            model,
            None,
            cf.schemes.gpipe(1, 1),
            optimizer=torch.optim.SGD,
            list_layers=lambda network: list(network.children()),
            example=sample(0, 2, 4),
        )


def loss_of(output: Any, target: Tensor) -> Tensor:
    scores = output["scores"].squeeze(-1) if isinstance(output, dict) else output[0].mean((2, 3))
    return nn.functional.mse_loss(scores, target)


def trained(model: nn.Module, schedule: Any, batches: Any, options: Any) -> Any:
    pipeline = cf.Pipeline(
        model,
        loss_of,
        schedule,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
        example=batches[0][0],
        **options,
    )
    losses = [pipeline.step(*batch).loss for batch in batches]
    return losses, pipeline.evaluate(*batches[0]).loss, pipeline.model_state_dict()


class Plain(Residuals):
    """Without statistics over samples and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            block[1] = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        value = self.entry(x) * self.scale + self.shift
        first = value
        for block in self.blocks:
            value = value + block(value)
        return {"scores": self.head(value + first)[..., None]}


@pytest.mark.table
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (cf.schemes.dapple(4, 4), {}),
        (cf.schemes.zb_v(2, 4), {}),
        (cf.schemes.chimera(4, 4), {"recompute": "layer"}),
        (cf.schemes.chimera(2, 4, concat="backward-halving"), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["residuals", "net"])
def test_stages_train_as_one_process(kind: str, schedule: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if kind == "residuals":
        model: nn.Module = Plain()
        batches: list[tuple[Any, Tensor]] = [(sample(n, 8, 4), sample(10 + n, 8, 3)) for n in range(3)]
    else:
        model = Net()
        batches = [((sample(n, 8, 3, 8, 8), sample(20 + n, 8)), sample(10 + n, 8, 3)) for n in range(3)]
    model.double()
    batches = torch.utils._pytree.tree_map_only(Tensor, Tensor.double, batches)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    expected = []
    for inputs, target in batches:
        optimizer.zero_grad()
        expected_loss = loss_of(alone(*inputs) if isinstance(inputs, tuple) else alone(inputs), target)
        expected_loss.backward()
        optimizer.step()
        expected.append(expected_loss.item())
    losses, evaluated, state = cf.launch(
        trained, model, schedule, batches, options, workers=schedule.workers, transport="local"
    )[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    inputs, target = batches[0]
    after = loss_of(alone(*inputs) if isinstance(inputs, tuple) else alone(inputs), target).item()
    assert evaluated == pytest.approx(after, rel=1e-12)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=name)


class Padded(nn.Module):
    """Packs its sequences, which needs the values of their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory, self.head = nn.Embedding(11, 6), nn.LSTM(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, True, enforce_sorted=False)
        padded = nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], True, total_length=x.shape[1])
        return self.head(padded[0])  # type: ignore[no-any-return]


def test_the_refusal_of_a_packed_sequence_is_shown() -> None:
    with pytest.raises(
        cf.ConfigError, match=r"the forward of 'memory' fails on tensors without values .*tensors that have"
    ):
        cf.layers(Padded(), (ids(0, 4, 5), torch.full((4,), 3)))


class Starts(nn.Module):
    """Sets its weights by the values of its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.register_buffer("ready", torch.tensor(data=False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(x.std(0))
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def test_the_refusal_of_a_block_does_not_say_to_make_it_one() -> None:
    model = nn.Sequential(Starts(), Starts())
    with pytest.raises(cf.ConfigError, match=r"the forward of '0' decides by .*not traced are called with"):
        cf.layers(model, sample(0, 4, 6))


class Counts(nn.Module):
    """A block that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.parts(x)  # type: ignore[no-any-return]


def test_too_few_layers_name_the_module_that_was_not_looked_into() -> None:
    def made() -> None:
        cf.Pipeline(
            nn.Sequential(Counts(), nn.Linear(6, 2)),
            nn.MSELoss(),
            cf.schemes.dapple(4, 4),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            example=sample(0, 4, 6),
        )

    match = r"2 layers for 4 stages: the module '0' could not be looked into, because its forward .*'calls'"
    with pytest.raises(cf.ConfigError, match=match):
        cf.launch(made, workers=4, transport="local")


class Named(nn.Module):
    """A model that sees the order of the arguments that it does not name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0, **features: Tensor) -> Tensor:
        joined = torch.cat([x, *features.values()], 1)
        return self.second(torch.tanh(self.first(joined))) * scale  # type: ignore[no-any-return]


def test_arguments_that_only_kwargs_takes_stay_in_the_order_of_the_mini_batch() -> None:
    model = Named()
    batch = {"speed": torch.randn(4, 4), "x": torch.randn(4, 4), "height": torch.randn(4, 4)}
    layers = cf.layers(model, batch)
    torch.testing.assert_close(nn.Sequential(*layers)(batch), model(**batch), rtol=0, atol=0)
    same_order = {name: batch[name] for name in ("x", "speed", "height")}
    torch.testing.assert_close(layers[0](same_order), layers[0](batch))
    other_order = {name: batch[name] for name in ("x", "height", "speed")}
    with pytest.raises(cf.ConfigError, match="another structure"):
        layers[0](other_order)


class Joined(nn.Module):
    """A model of a list, or of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, xs: Any, other: Tensor | None = None) -> Tensor:
        x = torch.cat([*xs], 1) if other is None else torch.cat([xs, other], 1) * 2
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def test_a_list_is_one_argument_or_several_if_the_model_allows_only_one_of_these() -> None:
    model, pair = Joined(), [torch.randn(6, 4), torch.randn(6, 4)]
    with pytest.raises(
        cf.ConfigError, match=r"list of 2, which the model may take as one .* \{'xs': inputs\}"
    ):
        cf.layers(model, pair)
    for inputs, expected in (({"xs": pair}, model(pair)), (tuple(pair), model(*pair))):
        output = nn.Sequential(*cf.layers(model, inputs))(inputs)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
