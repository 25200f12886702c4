"""A backward in two ops, against the same backward in one: every gradient, and what is kept between."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from counterflow.errors import ConfigError
from counterflow.runtime.stages import weight_gradients
from counterflow.runtime.stages.detach_points import DetachPoints
from counterflow.runtime.stages.split_backward import SplitBackward, SplitBackwardPlanner

WIDTH = 6


class Both(nn.Module):
    """Of what it holds, what a function makes of it and the input."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


class Times(torch.autograd.Function):
    """A matrix product of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH,))))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def mlp() -> list[nn.Module]:
    return [nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(6)]


def transformer() -> list[nn.Module]:
    return [
        nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(3)
    ]


def norm_used_twice() -> list[nn.Module]:
    norm = nn.LayerNorm(WIDTH)
    return [
        Both(lambda s, x: s.norm(x + s.lin(s.norm(x))), norm=norm, lin=linear()),
        Both(lambda s, x: s.norm(s.lin(x)), norm=norm, lin=linear()),
    ]


def weight_used_twice() -> list[nn.Module]:
    shared = linear()
    return [Both(lambda s, x: s.lin(torch.tanh(s.lin(x))), lin=shared), nn.Tanh(), shared]


def lora() -> list[nn.Module]:
    def layer() -> nn.Module:
        return Both(
            lambda s, x: s.base(x) + s.up(s.down(x)),
            base=frozen(linear()),
            down=nn.Linear(WIDTH, 2, bias=False),
            up=nn.Linear(2, WIDTH, bias=False),
        )

    return [layer(), frozen(linear()), layer()]


def normed_weight() -> list[nn.Module]:
    return [nn.utils.parametrizations.weight_norm(linear()), nn.Tanh(), linear()]


def own_function() -> list[nn.Module]:
    times: Callable[..., Tensor] = Times.apply
    return [Both(lambda s, x: times(x, s.weight), weight=vector(WIDTH, WIDTH)), linear()]


def in_place() -> list[nn.Module]:
    def views(s: Any, x: Tensor) -> Tensor:
        y: Tensor = s.lin(x)
        y[..., :2] *= 2
        y[..., 2:].add_(s.lin(x)[..., 2:])
        return y

    return [linear(), nn.ReLU(inplace=True), Both(views, lin=linear()), linear(), nn.ReLU(inplace=True)]


def checkpointed(*, reentrant: bool) -> list[nn.Module]:
    inner = nn.Sequential(linear(), nn.Tanh(), linear())
    return [
        linear(),
        Both(lambda s, x: checkpoint(s.inner, x, use_reentrant=reentrant), inner=inner),
        linear(),
    ]


def past_a_layer() -> list[nn.Module]:
    """The third layer takes what the first one made, past the second."""
    first = Both(lambda s, x: s.keep(s.lin(x)), lin=linear())
    first.keep = lambda y: setattr(first, "kept", y) or y * 2  # type: ignore[assignment, func-returns-value]
    return [first, *mlp(), Both(lambda s, x: s.lin(x) + first.kept, lin=linear())]


def hooked() -> list[nn.Module]:
    def scaled(s: Any, x: Tensor) -> Tensor:
        y: Tensor = s.lin(x)
        y.register_hook(lambda gradient: gradient * 0.5)
        return y

    return [Both(scaled, lin=linear()) for _ in range(3)]


def weights_alone() -> list[nn.Module]:
    return [Both(lambda s, x: s.lin(x) * s.scale.exp().sum() + s.table.tanh(), lin=linear(),
                 scale=vector(WIDTH, WIDTH), table=vector(2, 3, WIDTH))]  # fmt: skip


def norms() -> list[nn.Module]:
    return [
        nn.Conv1d(3, 3, 3, padding=1),
        nn.BatchNorm1d(3),
        nn.PReLU(),
        nn.Conv1d(3, 3, 1),
        nn.BatchNorm1d(3),
    ]


def scaled_products() -> list[nn.Module]:
    def scaled(s: Any, x: Tensor) -> Tensor:
        rows: Tensor = torch.addmm(s.lin.bias, x.flatten(0, -2), s.lin.weight.t(), alpha=0.5, beta=2.0)
        return rows.view(*x.shape)

    return [Both(scaled, lin=linear()), linear()]


def bias_matrix() -> list[nn.Module]:
    """A bias of each element, with as many rows as a weight has."""
    rows = 2 * 3
    layer = Both(
        lambda s, x: torch.addmm(s.bias, x.flatten(0, -2), s.weight.t()).view(2, 3, rows),
        bias=vector(rows, rows),
        weight=vector(rows, WIDTH),
    )
    return [linear(), layer]


def bias_used_twice() -> list[nn.Module]:
    return [Both(lambda s, x: s.lin(x) * s.lin.bias, lin=linear()), linear()]


def recurrent() -> list[nn.Module]:
    return [Both(lambda s, x: s.rnn(x)[0], rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True)), linear()]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "a norm used twice": norm_used_twice,
    "a weight used twice": weight_used_twice,
    "lora": lora,
    "a weight that is computed": normed_weight,
    "a function of one's own": own_function,
    "in place and views": in_place,
    "checkpointed": lambda: checkpointed(reentrant=False),
    "checkpointed by a function": lambda: checkpointed(reentrant=True),
    "past a layer": past_a_layer,
    "hooks": hooked,
    "weights alone": weights_alone,
    "batch norms": norms,
    "scaled products": scaled_products,
    "a bias of each element": bias_matrix,
    "a bias used twice": bias_used_twice,
    "recurrent": recurrent,
    "nothing to train": lambda: [nn.Tanh(), frozen(linear())],
    "one layer": lambda: [linear()],
    "dropout": lambda: [linear(), nn.Dropout(0.5), linear()],
    "a product": lambda: [Both(lambda s, x: x @ s.a @ s.b, a=vector(WIDTH, WIDTH), b=vector(WIDTH, 2))],
}


def run(
    layers: list[nn.Module], value: Any, split_planner: SplitBackwardPlanner | None, *, needs: bool = True
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of inputs and weights after three micro-batches."""
    module = nn.ModuleList(layers)
    module.zero_grad()
    gradients: list[Tensor | None] = []
    for number in range(3):
        torch.manual_seed(number)
        given = [leaf.detach().clone().requires_grad_(needs) for leaf in value]
        detach_points = DetachPoints(split_planner) if split_planner is not None else None
        x: Any = given[0] * 1 if len(given) == 1 else tuple(leaf * 1 for leaf in given)
        for index, layer in enumerate(layers):
            if index and detach_points is not None:
                x = detach_points.before(index, x)
            x = layer(x)
        outputs = [x] if isinstance(x, Tensor) else list(x)
        outputs = [output for output in outputs if output.requires_grad]
        above = [torch.randn_like(output) for output in outputs]
        if not outputs:
            continue
        if detach_points is None or split_planner is None:
            torch.autograd.backward(outputs, above)
        else:
            detach_points.learn(outputs, given)
            split = SplitBackward(split_planner, given, detach_points)
            split.input_gradient(outputs, above)
            split.weight_gradients()
        gradients += [leaf.grad for leaf in given]
    return gradients, [parameter.grad for parameter in module.parameters()]


def both(
    make: Callable[[], list[nn.Module]], value: tuple[Tensor, ...] | None = None, **options: Any
) -> tuple[list[nn.Module], SplitBackwardPlanner]:
    """Compare; and the model with what is known of it."""
    torch.manual_seed(0)
    layers = [layer.double() for layer in make()]
    given = value or (torch.randn(2, 3, WIDTH, dtype=torch.float64),)
    state = [{n: b.clone() for n, b in layer.state_dict().items()} for layer in layers]
    whole = run(layers, given, None, **options)
    whole = whole[0], [None if g is None else g.clone() for g in whole[1]]
    for layer, before in zip(layers, state, strict=True):
        layer.load_state_dict(before)
    split_planner = SplitBackwardPlanner(
        0, lambda: [p for layer in layers for p in layer.parameters()], direct=True
    )
    for parameter in nn.ModuleList(layers).parameters():
        parameter.grad = None
    split = run(layers, given, split_planner, **options)
    for ours, theirs in ((split[0], whole[0]), (split[1], whole[1])):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) is (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return layers, split_planner


@pytest.mark.parametrize("needs", [True, False], ids=["inputs with a gradient", "inputs without"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_whole_backward(name: str, needs: bool) -> None:
    both(MODELS[name], needs=needs)


def test_complex_weights() -> None:
    def make() -> list[nn.Module]:
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        return [Both(lambda s, x: torch.view_as_real((x * (1 + 2j)) @ s.weight).sum(-1), weight=weight)] * 2

    torch.manual_seed(0)
    layers = make()
    weight = layers[0].weight
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    split_planner = SplitBackwardPlanner(0, lambda: [weight], direct=True)  # type: ignore[list-item]
    whole = run(layers, (x,), None)[1][0]
    assert whole is not None
    whole = whole.clone()
    split = run(layers, (x,), split_planner)[1][0]
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


def test_several_inputs_and_outputs() -> None:
    def crossed(s: Any, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        a, b = value
        return s.one(a) + b, s.two(b), a.detach() + 1

    def rest(s: Any, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b, c = value
        return s.one(a) * torch.sigmoid(c), b

    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    both(lambda: [Both(crossed, one=linear(), two=linear()), Both(rest, one=linear())], (x, x + 1))


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about its own code
def test_a_compiled_layer_has_its_whole_backward_with_the_input_gradient() -> None:
    def make() -> list[nn.Module]:
        layer = Both(lambda s, x: s.two(torch.tanh(s.one(x))), one=linear(), two=linear())
        return [torch.compile(layer.double(), backend="aot_eager")]  # type: ignore[list-item]

    _, split_planner = both(make)
    assert not split_planner.is_split


def test_hooks_of_weights_are_called_once_a_micro_batch() -> None:
    layers = [nn.LayerNorm(WIDTH), linear()]
    weights = [p for layer in layers for p in layer.parameters()]
    seen: list[int] = []
    after: list[int] = []
    for number, weight in enumerate(weights):
        weight.register_hook(lambda _, number=number: seen.append(number))
        weight.register_post_accumulate_grad_hook(lambda _, number=number: after.append(number))
    split_planner = SplitBackwardPlanner(0, lambda: weights, direct=True)
    run(layers, (torch.randn(2, 3, WIDTH),), split_planner)
    assert split_planner.is_split
    assert sorted(seen) == sorted(after) == sorted(3 * [*range(len(weights))])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_products_add_into_the_gradients_without_autograd(
    bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear(bias=bias).to(dtype)
    weights = list(layer.parameters())
    x = torch.randn(2, 3, WIDTH, dtype=dtype, requires_grad=True)
    above = torch.randn(2, 3, WIDTH, dtype=dtype)
    expected = torch.autograd.grad(layer(x), weights, above)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    split = SplitBackward(SplitBackwardPlanner(0, lambda: weights, direct=True), [x])
    split.input_gradient([layer(x)], [above])
    monkeypatch.setattr(weight_gradients, "accumulate", None)
    split.weight_gradients()
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5  # autograd rounds once more
        torch.testing.assert_close(weight.grad, gradient + 1, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gradient", [None, "double", "hooked"])
def test_a_gradient_of_another_kind_is_left_to_autograd(gradient: str | None) -> None:
    layer = linear(bias=False)
    x = torch.randn(4, WIDTH, requires_grad=True)
    above = torch.randn(4, WIDTH)
    (expected,) = torch.autograd.grad(layer(x), [layer.weight], above)
    if gradient == "double":
        layer.weight.grad_dtype = torch.float64
        layer.weight.grad = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    elif gradient == "hooked":
        layer.weight.register_hook(lambda gradient: 2 * gradient)
        layer.weight.grad, expected = torch.zeros(WIDTH, WIDTH), 2 * expected
    split = SplitBackward(SplitBackwardPlanner(0, lambda: [layer.weight], direct=True), [x])
    split.input_gradient([layer(x)], [above])
    split.weight_gradients()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.float(), expected)


def test_gradients_are_accumulated_in_place() -> None:
    layers = [nn.LayerNorm(WIDTH), linear()]
    weights = [p for layer in layers for p in layer.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    before = [(weight.grad, weight.grad._version) for weight in weights if weight.grad is not None]
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    output = layers[1](layers[0](x))
    split = SplitBackward(SplitBackwardPlanner(0, lambda: weights, direct=True), [x])
    split.input_gradient([output], [torch.ones_like(output)])
    split.weight_gradients()
    for weight, (gradient, version) in zip(weights, before, strict=True):
        assert weight.grad is gradient
        assert gradient._version > version


def test_what_only_the_input_gradient_needed_is_freed_after_it() -> None:
    first, second = linear(bias=False), linear(bias=False)
    x = torch.randn(4, WIDTH, requires_grad=True)
    middle = torch.sigmoid(first(x))  # its output is saved for it and for the second product
    bent = torch.exp(middle)  # its output is saved for it alone
    output = second(middle) + bent.sin()
    alone = StorageWeakRef(bent.untyped_storage())
    shared = StorageWeakRef(middle.untyped_storage())
    split = SplitBackward(SplitBackwardPlanner(0, lambda: [first.weight, second.weight], direct=True), [x])
    graph = weakref.ref(output)
    split.input_gradient([output], [torch.ones_like(output)], look=True)
    kept = {tensor.untyped_storage().data_ptr() for tensor in split.saved_tensors()}
    assert {x.untyped_storage().data_ptr(), middle.untyped_storage().data_ptr()} <= kept
    assert bent.untyped_storage().data_ptr() not in kept
    del output, bent, middle
    assert graph() is None
    assert alone.expired()
    assert not shared.expired()
    split.weight_gradients()
    assert shared.expired()


def test_large_graphs_are_joined_between_layers() -> None:
    _, split_planner = both(lambda: [nn.Sequential(*mlp()) for _ in range(3)])
    assert split_planner.detached_layers == frozenset((1, 2))
    _, split_planner = both(past_a_layer)
    assert split_planner.detached_layers == frozenset()
    _, split_planner = both(lambda: [linear(), nn.Tanh(), linear()], needs=False)
    assert split_planner.detached_layers == frozenset((1,))  # what comes first needs no input gradient
    _, split_planner = both(in_place, needs=False)
    assert split_planner.detached_layers == frozenset((2,))  # the second changes what it takes


def test_a_later_forward_past_a_layer_is_told() -> None:
    layers: list[nn.Module] = [nn.Sequential(*mlp()) for _ in range(3)]
    split_planner = SplitBackwardPlanner(
        7, lambda: [p for layer in layers for p in layer.parameters()], direct=True
    )
    x = torch.randn(2, WIDTH)
    run(layers, (x,), split_planner)
    assert split_planner.detached_layers == frozenset((1, 2))
    held: list[Tensor] = []
    layers[0].register_forward_hook(lambda _module, _given, output: held.append(output))
    layers[2].register_forward_hook(lambda _module, _given, output: output + held.pop())
    with pytest.raises(ConfigError, match="a layer of stage 7 takes a tensor of another layer past"):
        run(layers, (x,), split_planner)


def test_autocast() -> None:
    layers = mlp()
    x = torch.randn(4, WIDTH)

    def gradients(split_planner: SplitBackwardPlanner | None) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            return [None if g is None else g.clone() for g in run(layers, (x,), split_planner)[1]]

    whole = gradients(None)
    split = gradients(
        SplitBackwardPlanner(0, lambda: [p for layer in layers for p in layer.parameters()], direct=True)
    )
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_a_loss_is_the_output() -> None:
    layer = linear()
    x = torch.randn(4, WIDTH, requires_grad=True)
    loss = functional.mse_loss(layer(x), torch.ones(4, WIDTH))
    expected = torch.autograd.grad(loss, [x, layer.weight], retain_graph=True)
    split = SplitBackward(SplitBackwardPlanner(0, lambda: [layer.weight], direct=True), [x])
    split.input_gradient([loss], [])
    assert layer.weight.grad is None
    split.weight_gradients()
    torch.testing.assert_close([x.grad, layer.weight.grad], list(expected))
