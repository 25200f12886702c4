"""A model against the list of its layers: each way in which a list slips, and that nothing changes."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import counterflow as cf
from counterflow.verification.diagnosis.comparison import difference


class Act(nn.Module):
    """A function as a layer, with the modules it calls."""

    def __init__(self, function: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, value: Any) -> Any:
        return self.function(value, *self.inner)


class Net(nn.Module):
    """Tokens and positions, a residual block whose activation is a function, and a head."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.positions = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = x + self.second(functional.gelu(self.first(x)))
        return self.head(self.dropout(self.norm(x)))


def entry(tokens: Tensor, embed: nn.Module, positions: nn.Module) -> Any:
    return embed(tokens) + positions(torch.arange(tokens.shape[1]))


def block(x: Tensor, first: nn.Module, second: nn.Module) -> Any:
    return x + second(functional.gelu(first(x)))


def glued(net: Net) -> list[nn.Module]:
    return [
        Act(entry, net.embed, net.positions),
        Act(block, net.first, net.second),
        net.norm,
        net.dropout,
        net.head,
    ]


TOKENS = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 1]])


def found(model: nn.Module, layers: list[nn.Module], inputs: Any, *args: Any, **options: Any) -> cf.SameModel:
    return cf.same_model(model, layers, inputs, *args, check=False, **options)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_layers_that_are_the_model(net: Net) -> None:
    same = cf.same_model(net, glued(net), TOKENS)
    assert (same.ok, same.differences, same.first_difference) == (True, (), "")
    assert (same.output_error, same.loss_error, same.gradient_error) == (0.0, 0.0, 0.0)
    assert (same.missing_modules, same.missing_parameters, same.extra_parameters) == ((), (), ())
    assert same.dtype == torch.float64
    assert repr(same) == "SameModel: the same (output 0.0e+00, loss 0.0e+00, gradients 0.0e+00; float64)"


def test_loss_and_targets(net: Net) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    assert cf.same_model(net, glued(net), TOKENS, loss, TOKENS.flip(1)).ok
    slipped = found(net, [*glued(net)[:-1], Act(lambda x, head: 2 * head(x), net.head)], TOKENS, loss, TOKENS)
    assert slipped.loss_error > 1e-3
    assert any(text.startswith("the loss differs by ") for text in slipped.differences)
    assert "head.weight" in slipped.gradients


def test_a_forgotten_activation() -> None:
    torch.manual_seed(0)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.b(functional.relu(self.a(x)))

    model = Mlp()
    with pytest.raises(cf.ConfigError) as error:
        cf.same_model(model, [model.a, model.b], torch.randn(4, 3))
    text = str(error.value)
    assert text.startswith(
        "the 2 layers are not the Mlp: layer 1 (Linear): 'b' has another input than in the "
    )
    assert "what 'a' of layer 0 returns is the same" in text
    assert "outputs differ by " in text
    slipped = found(model, [model.a, model.b], torch.randn(4, 3))
    assert not slipped.ok
    assert set(slipped.gradients) >= {"a.weight", "b.weight"}
    assert len(repr(slipped).splitlines()) <= 6


def test_a_residual_left_out(net: Net) -> None:
    layers = glued(net)
    layers[1] = Act(lambda x, first, second: second(functional.gelu(first(x))), net.first, net.second)
    slipped = found(net, layers, TOKENS)
    assert slipped.first_difference.startswith("layer 2 (LayerNorm): 'norm' has another input")
    assert slipped.first_difference.endswith(
        "; let this layer or the one before do what the model does just before it calls 'norm' (what "
        "'second' of layer 1 returns is the same)"
    )


def test_positions_added_twice(net: Net) -> None:
    layers = glued(net)
    layers[0] = Act(lambda t, embed, p: embed(t) + 2 * p(torch.arange(t.shape[1])), net.embed, net.positions)
    assert found(net, layers, TOKENS).first_difference.startswith("layer 1 (Act): 'first' has another input")


def test_after_the_last_module_and_another_structure(net: Net) -> None:
    layers = [*glued(net)[:-1], Act(lambda x, head: -head(x), net.head)]
    assert found(net, layers, TOKENS).first_difference == (
        "layer 4 (Act) or after it: all earlier inputs and outputs of modules are equal; let the last layers "
        "return what the model returns"
    )
    layers = [*glued(net), Act(lambda x: {"logits": x})]
    slipped = found(net, layers, TOKENS)
    assert slipped.output_error == float("inf")
    assert slipped.differences[1] == (
        "outputs have another structure: the model alone returns one value, the layers alone return "
        "['logits']; return the same, or call the model with `run=` so that it does"
    )
    assert cf.same_model(net, layers, TOKENS, run=lambda model, tokens: {"logits": model(tokens)}).ok


def test_a_tied_head_that_is_a_copy() -> None:
    torch.manual_seed(0)
    net = Net(tied=True)
    assert cf.same_model(net, glued(net), TOKENS).ok
    slipped = found(net, [*glued(net)[:-1], copy.deepcopy(net.head)], TOKENS)
    assert slipped.output_error == 0.0
    assert slipped.extra_parameters == (
        "weight of layer 4 (Linear) is not a parameter of the model, but a copy of its 'embed.weight' that "
        "would be trained on its own",
    )
    assert set(slipped.gradients) == {"embed.weight"}
    assert slipped.missing_modules == ("head",)


def test_a_layer_called_twice(net: Net) -> None:
    layers = glued(net)
    slipped = found(net, [*layers[:2], layers[1], *layers[2:]], TOKENS)
    assert slipped.first_difference.startswith(
        "layer 2 (Act): it calls 'first' 2 times up to here, the model 1 in total; leave this call out, or "
        "the layer that is in the list twice (what 'second' of layer 1 returns is the same)"
    )


def test_a_table_that_layers_make_again_is_no_difference() -> None:
    torch.manual_seed(0)

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            table = self.table(torch.ones(3, dtype=x.dtype))
            return self.b(self.a(x) + table) + table

    model = Tables()

    def a(x: Tensor, a: nn.Module, table: nn.Module) -> Any:
        return a(x) + table(torch.ones(3, dtype=x.dtype))

    layers = [Act(a, model.a, model.table), Act(a, model.b, model.table)]
    assert cf.same_model(model, layers, torch.randn(2, 3)).ok


def test_a_module_that_is_not_called(net: Net) -> None:
    slipped = found(net, [*glued(net)[:2], net.head], TOKENS)
    assert slipped.missing_modules == ("norm", "dropout")
    assert slipped.missing_parameters == ("norm.weight", "norm.bias")
    assert "no layer has the model's 'norm.weight', 'norm.bias', which would never be trained" in (
        slipped.differences
    )
    net.eval()
    left_out = found(net, [layer for layer in glued(net) if layer is not net.dropout], TOKENS)
    assert left_out.output_error == 0.0
    assert left_out.differences == ("the layers never call 'dropout', which the model calls",)


def test_a_frozen_parameter_in_no_layer_is_told(net: Net) -> None:
    net.extra = nn.Linear(2, 2, bias=False).requires_grad_(False)
    same = cf.same_model(net, glued(net), TOKENS)
    assert same.missing_parameters == ("extra.weight (frozen)",)
    net.extra.requires_grad_(True)
    slipped = found(net, glued(net), TOKENS)
    assert slipped.differences == ("no layer has the model's 'extra.weight', which would never be trained",)


def test_gradients_alone(net: Net) -> None:
    layers = glued(net)
    layers[1] = Act(
        lambda x, first, second: x + second(functional.gelu(first(x))).detach(), net.first, net.second
    )
    slipped = found(net, layers, TOKENS)
    assert slipped.output_error == slipped.loss_error == 0.0
    assert set(slipped.gradients) >= {"first.weight", "second.weight", "embed.weight"}
    assert slipped.first_difference.startswith("layer 1 (Act): the last one with a gradient that differs")


def test_another_order_of_the_same_draws() -> None:
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.drop_a, self.drop_b = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Any:
            y = self.drop_a(self.a(x))
            return y + self.drop_b(self.b(x))

    def turned(x: Tensor, a: nn.Module, b: nn.Module, drop_a: nn.Module, drop_b: nn.Module) -> Any:
        y = drop_b(b(x))
        return drop_a(a(x)) + y

    model = Two()
    parts = model.a, model.b, model.drop_a, model.drop_b
    same = cf.same_model(model, [Act(turned, *parts)], torch.randn(4, 6))
    assert same.ok
    wrong = found(model, [Act(lambda x, *p: turned(x, *p) * 2, *parts)], torch.randn(4, 6))
    assert not wrong.ok
    kept = found(model, [Act(lambda x, a, b, _, d: a(x) + d(b(x)), *parts)], torch.randn(4, 6))
    assert not kept.ok
    assert any("the model draws random numbers 2 times but the layers 1 times" in t for t in kept.differences)


def test_dropout_draws_the_same() -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.5)
    assert cf.same_model(net, glued(net), TOKENS).ok


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_what_its_forward_drew(reentrant: bool) -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.5)

    def again(x: Tensor, first: nn.Module, second: nn.Module, dropout: nn.Module) -> Any:
        x = block(x, first, second)
        return dropout(x) + dropout(functional.gelu(x))

    class Whole(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, tokens: Tensor) -> Any:
            net = self.net
            x = entry(tokens, net.embed, net.positions)
            return net.head(net.norm(again(x, net.first, net.second, net.dropout)))

    def checked(x: Tensor, *parts: nn.Module) -> Any:
        return checkpoint(again, x, *parts, use_reentrant=reentrant)

    layers = [
        Act(entry, net.embed, net.positions),
        Act(checked, net.first, net.second, net.dropout),
        net.norm,
        net.head,
    ]
    assert cf.same_model(Whole(net), layers, TOKENS).ok


def test_dropout_in_the_other_mode() -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.5)

    def left_on(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)  # training=True whatever the mode

    layers = [layer for layer in glued(net) if layer is not net.dropout]
    layers.insert(3, Act(left_on))
    for mode in (True, False):
        net.train(mode)
        assert not found(net, layers, TOKENS).ok
    assert any(
        "the model draws random numbers 0 times but the layers 1 times" in text
        for text in (found(net, layers, TOKENS).differences)
    )
    net.dropout.eval()
    net.train()
    evaluated = copy.deepcopy(net.dropout).eval()
    slipped = found(net, [*glued(net)[:3], evaluated, net.head], TOKENS)
    assert not slipped.ok
    assert slipped.missing_modules == ("dropout",)


def test_a_reshape_between_layers() -> None:
    torch.manual_seed(0)

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(18, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.conv(x).transpose(2, 3).flatten(1))

    model, inputs = Image(), torch.randn(4, 1, 3, 3)
    turned = Act(lambda x: x.transpose(2, 3).flatten(1))
    assert cf.same_model(model, [model.conv, turned, model.head], inputs).ok
    slipped = found(
        model, [model.conv, nn.Flatten(), model.head], inputs
    )  # the shape is right, the order is not
    assert slipped.first_difference.startswith("layer 2 (Linear): 'head' has another input than in the model")
    assert "do what the model does just before it calls 'head'" in slipped.first_difference
    left_out = found(model, [model.conv, model.head], inputs)
    assert left_out.first_difference.startswith("layer 1 (Linear) fails (RuntimeError: mat1 and mat2 shapes")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_of_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    from counterflow.models import hf

    from ..models.hf import tiny

    model = tiny.made(name)
    inputs, _ = tiny.batch(name)
    layers = hf.layers(model)
    assert cf.same_model(model, layers, kwargs={**inputs}, run=lambda m, _: m(**inputs, use_cache=False)).ok
    slipped = found(model, [layers[0], *layers[2:]], inputs, run=lambda m, _: m(**inputs, use_cache=False))
    assert slipped.missing_parameters
    assert slipped.first_difference.startswith("layer 1 (")


def test_a_model_with_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    inputs = torch.randn(6, 3)
    same = cf.same_model(model, list(model), inputs)  # the first bias has a gradient of rounding alone
    assert same.ok
    assert same.output_error == 0.0
    twice = Act(lambda x, norm: norm(x) + 0 * norm(x), model[1])
    again = found(model, [model[0], twice, model[2], model[3]], inputs)
    assert again.output_error < 1e-9
    assert again.differences == (
        "the layers leave different values in the buffers '1.running_mean', '1.running_var', "
        "'1.num_batches_tracked'",
    )


def test_pytrees_keywords_and_skips(net: Net) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(5, 2)

        def forward(self, x: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
            return {"y": self.b(torch.cat([self.a(x["u"]) * scale, x["u"]], 1)), "v": x["v"]}

    class First(nn.Module):
        def __init__(self, pairs: Pairs, skip: cf.Skip) -> None:
            super().__init__()
            self.a, self.keep = pairs.a, skip.saver()

        def forward(self, x: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
            return self.a(self.keep(x["u"])) * scale, x["v"]

    model, skip = Pairs(), cf.Skip("u")

    def last(given: tuple[Tensor, Tensor], b: nn.Module, load: nn.Module) -> dict[str, Tensor]:
        return {"y": b(torch.cat([given[0], load()], 1)), "v": given[1]}

    load = skip.loader()
    layers = [First(model, skip), Act(last, model.b, load)]
    inputs = {"u": torch.randn(3, 2), "v": torch.arange(3)}
    assert cf.same_model(model, layers, inputs, kwargs={"scale": 0.5}).ok
    assert cf.same_model(model, layers, kwargs={"x": inputs}).ok
    swapped = Act(lambda g, b, load: {**last(g, b, load), "v": g[1] + 1}, model.b, load)
    assert found(model, [layers[0], swapped], inputs).output_error == float("inf")


def test_a_layer_that_fails_and_a_model_that_fails(net: Net) -> None:
    slipped = found(net, [*glued(net)[:3], nn.Linear(3, 3), net.head], TOKENS)
    assert slipped.first_difference.startswith("layer 3 (Linear) fails (RuntimeError: mat1 and mat2")
    with pytest.raises(cf.ConfigError, match=r"the Net itself fails \(.*\): the layers cannot be compared"):
        cf.same_model(net, glued(net), torch.ones(2, 3))


def test_what_cannot_run_in_float64() -> None:
    class Single(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return super().forward(x)

    model = nn.Sequential(Single(3, 3), nn.Tanh())
    assert cf.same_model(model, list(model), torch.randn(2, 3)).dtype == torch.float32


def test_what_a_function_holds_is_refused(net: Net) -> None:
    layers = glued(net)
    layers[-1] = Act(lambda x: 1 * net.head(x))
    with pytest.raises(cf.ConfigError, match=r"'head' of the model is used by a function that holds it"):
        cf.same_model(net, layers, TOKENS)
    layers[-1] = Act(lambda x: functional.linear(x.float(), net.head.weight))
    with pytest.raises(cf.ConfigError, match=r"'head\.weight' of the model is used by a function"):
        cf.same_model(net, layers, TOKENS)


def test_what_cannot_be_compared(net: Net) -> None:
    object.__setattr__(net, "lock", threading.Lock())
    with pytest.raises(cf.ConfigError, match=r"the Net, its layers or the loss function cannot be copied \("):
        cf.same_model(net, glued(net), TOKENS)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(cf.ConfigError, match="on the meta device and have no values to compare"):
        cf.same_model(meta, meta, torch.ones(1, 2))


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    model[1].eval()
    model[0].weight.grad = kept = torch.ones(4, 3)
    inputs = torch.randn(5, 3)
    before = copy.deepcopy(model.state_dict()), inputs.clone(), kept.clone()
    states = torch.get_rng_state(), random.getstate()
    cf.same_model(model, list(model), inputs)
    found(model, [model[0], model[3]], inputs)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is kept
    assert torch.equal(kept, before[2])
    assert model[0].bias.grad is None
    assert torch.equal(inputs, before[1])
    assert [m.training for m in model] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([float("nan"), 2.0]), torch.tensor([float("nan"), 1.0]), 0.5),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), 0.0),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([1]), torch.tensor([2]), float("inf")),
        (torch.ones(1), torch.ones(2), float("inf")),
        ({"a": 1}, {"a": 2}, float("inf")),
        ({"a": "x"}, {"a": "x"}, 0.0),
    ],
)
def test_differences(one: Any, other: Any, expected: float) -> None:
    assert difference(one, other) == expected
