"""What users of plain torch bring: parametrizations, hooks, packed sequences, codes, aliases, own gradients.

A model has several of these at once, and runs in few schedules: which they are is for the other files.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from counterflow import ConfigError, Pipeline, launch, schemes

from .alone import Case, F, Given, adamw, agrees, numbers, piped, seeded
from .models import WIDTH, First, Mlp

FEW = [
    schemes.dapple(2, 4),
    schemes.chimera(2, 8, concat="forward-doubling"),
    schemes.chimera(2, 8, concat="backward-halving"),
    schemes.zb_v(2, 4),
    schemes.interleaved(2, 4, chunks=2),
    schemes.hanayo(2, 4, waves=1),
]


def linear(features: int = WIDTH) -> nn.Linear:
    return nn.Linear(features, WIDTH)


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


def tripled(_: nn.Module, given: Any, __: Any) -> Any:
    return (given[0] * 3,)


def halved(_: nn.Module, given: Any) -> Any:
    return (given[0] * 0.5,)


class Hooked(Mlp):
    """With hooks of all kinds, each of which changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient * 2)
        self.down.register_full_backward_hook(tripled)
        self.down.register_full_backward_pre_hook(halved)
        self.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        self.register_forward_hook(lambda _, __, output: output * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-1, 1) * 1.5)
        return y


class Checkpoints(nn.Module):
    """The user's own, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Mlp(), nn.Tanh(), Mlp())

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        found: Tensor = checkpoint(self.body, x, use_reentrant=True, preserve_rng_state=False)
        return found


def parametrized() -> list[nn.Module]:
    """A layer three times, in the first stage and the last."""
    normed = parametrizations.weight_norm(linear())
    again = nn.Sequential(normed, nn.Tanh())
    return [again, Hooked(), normed, parametrizations.orthogonal(linear()), Checkpoints(), again]


class Reads(nn.Module):
    """A recurrent layer over sequences of their own lengths; takes a packed sequence, or gives one."""

    def __init__(self, *, packs: bool = False) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.packs = packs

    def forward(self, given: Any) -> Any:
        if isinstance(given, rnn.PackedSequence):
            x, lengths = rnn.pad_packed_sequence(given, batch_first=True, total_length=5)
        else:
            x, lengths = given
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = self.rnn(packed)
        if self.packs:
            return y
        return x + rnn.pad_packed_sequence(y, batch_first=True, total_length=5)[0], lengths


class Attends(nn.Module):
    """torch's attention, with a mask by sample and one that is none of the samples' own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, given: Any) -> Any:
        x, lengths, *masks = given
        if not masks:
            padding = torch.arange(5) >= lengths[:, None]
            masks = [torch.zeros(padding.shape, dtype=F).masked_fill(padding, -torch.inf)]
            masks.append(torch.full((5, 5), -torch.inf, dtype=F).triu(1))
        padding, causal = masks
        y, _ = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal)
        return x + y, lengths, padding, causal


def sequences(step: int) -> Given:
    lengths = torch.arange(16) % 5 + 1
    lengths[::4] = 5  # in each half of a micro-batch
    return Given((numbers(step, 16, 5, WIDTH), lengths), numbers(step + 100, 16, 5, WIDTH))


class Aliases(nn.Module):
    """Hands on its input in many forms, a parameter and a buffer."""

    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(()))
        self.register_buffer("b", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        many = x[:, None].expand(-1, 3, -1)
        return [x, x[:, :2], x.t().t(), x.view(-1, WIDTH), self.s, self.b, x.detach(), many, x[:, :0]]


class Unites(nn.Module):
    """Changes in place what came, and makes one of it; complex numbers and views of conjugates on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, given: Any) -> Any:
        x, two, same, view, scale, ones, still, many, none = given
        y = self.linear(x) + same + view * scale + ones + still + many.sum(1) + none.sum()
        y[:, :2] += two
        y[:, 2:4].mul_(2)
        y.relu_()
        turned = torch.fft.fft(y)
        return {"f": turned, ("c", 1): turned.conj(), "n": turned.conj().imag, "e": [(), {}]}


class Back(nn.Module):
    """From those."""

    def forward(self, given: Any) -> Tensor:
        found: Tensor = (given["f"] * given["c", 1]).real / 8 + given["n"]
        return found


class Codes(nn.Module):
    """The nearest of some vectors, its number and a loss of its own, as an output of transformers is."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Any:
        code = torch.cdist(x, self.vectors).argmin(1)
        near = self.vectors[code]
        return Coded(x + (near - x).detach(), code, {"aside": (near - x.detach()).square().mean(1)})


class Coded(NamedTuple):
    """What it gives."""

    y: Tensor
    code: Tensor
    more: Any
    word: str = "code"


@dataclasses.dataclass
class Grown:
    """The same as a class that pytrees were told of."""

    parts: list[Tensor]
    code: Tensor
    aside: Tensor
    times: int = 1


pytree.register_dataclass(Grown)


class Decodes(nn.Module):
    """Looks codes up again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = linear(), nn.Embedding(6, WIDTH)

    def forward(self, given: Coded) -> Grown:
        y = self.linear(given.y) + self.table(given.code)
        return Grown([given.y, y], given.code.to(torch.uint8), given.more["aside"], len(given.word))


class Grows(nn.Linear):
    """Adds to a list."""

    def __init__(self) -> None:
        super().__init__(2 * WIDTH, WIDTH)

    def forward(self, given: Grown) -> Any:  # type: ignore[override]
        y = super().forward(torch.cat(given.parts, 1))
        return collections.deque(
            [*given.parts, y * given.times, (given.code > 2)[:, None], given.aside[:, None]]
        )


class Adds(nn.Module):
    """All of a list."""

    def forward(self, given: Any) -> Tensor:
        *parts, mask, aside = given
        found: Tensor = sum(parts) * mask + aside
        return found


class Forces(nn.Module):
    """The gradient of an energy, two ways; and weights that are put in for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.more = nn.Linear(WIDTH, 1), nn.Parameter(torch.randn(1, WIDTH) / 9)

    def of(self, x: Tensor) -> Tensor:
        weight = {"weight": self.energy.weight + self.more}
        found: Tensor = torch.func.functional_call(self.energy, weight, (x,))
        return functional.tanh(found).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.of(at), at, create_graph=True)
        other: Tensor = torch.func.grad(self.of)(x)
        found: Tensor = x + force + other + torch.func.vmap(self.energy)(x)
        return found


class Infers(nn.Linear):
    """Hands on what inference mode has made."""

    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            aside = x * 2
        return super().forward(x), aside


class Uses(nn.Linear):
    """A copy of it."""

    def forward(self, given: Any) -> Tensor:
        x, aside = given
        found: Tensor = super().forward(x) + aside.clone()
        return found


class PutsIn(nn.Linear):
    """Adds to the dict that came, and puts another tensor in place of one that it changes."""

    def forward(self, given: Any) -> Any:
        given["x"].mul_(2)
        given["x"] = given["x"] + 0
        given["h"] = super().forward(given["x"]).tanh()
        return given


class TakesOut(nn.Linear):
    """Takes all out of the dict that came; its forward has a derivative by forward-mode beside it."""

    def forward(self, given: Any) -> Any:
        both: Any = torch.func.jvp(super().forward, (given.pop("h"),), (given["x"],))
        y, along = both
        return {"x": given.pop("x") + along, "h": y}


class Normed(nn.Linear):
    """A norm that keeps no statistics; and the first value of a dict."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norm = nn.InstanceNorm1d(2, affine=True)

    def forward(self, given: Any) -> Tensor:
        y: Tensor = super().forward(given["h"]) + given["x"]
        found: Tensor = self.norm(y.view(-1, 2, WIDTH // 2)).flatten(1)
        return found


def classes(step: int) -> Given:
    """Some targets do not count: all of the first micro-batch's."""
    found = torch.randint(0, WIDTH, (16,), generator=torch.Generator().manual_seed(step))
    found[:5] = -100
    return Given(numbers(step, 16, WIDTH), found)


CASES = {
    "a dict changed in place, forward-mode, norms without statistics": Case(
        seeded(lambda: [PutsIn(WIDTH, WIDTH), *(TakesOut(WIDTH, WIDTH) for _ in range(3)), Normed()]),
        lambda step: Given({"x": numbers(step, 16, WIDTH)}, numbers(step + 100, 16, WIDTH)),
        modes=("none", "stage"),
    ),
    "cross entropy of the targets that count": Case(
        seeded(lambda: [Mlp() for _ in range(4)]), classes, nn.CrossEntropyLoss(label_smoothing=0.1)
    ),
    "parametrizations, hooks, checkpoints, a layer three times": Case(seeded(parametrized), plain),
    "packed sequences and masks": Case(
        seeded(lambda: [Reads(), Reads(packs=True), Reads(), Attends(), Attends(), First()]), sequences
    ),
    "aliases, changes in place, complex numbers": Case(
        seeded(lambda: [Mlp(), Aliases(), Unites(), Back(), Mlp()]), plain
    ),
    "codes in namedtuples, dataclasses and lists": Case(
        seeded(lambda: [Mlp(), Codes(), Decodes(), Grows(), Adds()]), plain
    ),
    "gradients in a forward, inference mode": Case(
        seeded(lambda: [Infers(WIDTH, WIDTH), Uses(WIDTH, WIDTH), Forces(), Mlp()]),
        plain,
        modes=("none", "stage"),
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's own forward-mode
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a forward that runs again later
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case) -> None:
    agrees(case, 2, schedules=FEW)


class Does(nn.Module):
    """What a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Lambda(nn.Module):
    """Its function was made with itself, and a copy's function still has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.function: Any = lambda x: self.linear(x)  # noqa: PLW0108 - a copy's would be another's

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(x)
        return found


REFUSED: list[tuple[Any, str]] = [
    (
        lambda: Does(lambda x: (x, x.detach().to_sparse())),
        "stage 0 gives a sparse_coo tensor; pass on the dense",
    ),
    (
        lambda: Does(lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged)),
        "stage 0 gives a nested tensor; pass on the dense",
    ),
    (lambda: Does(lambda x: (x, np.ones(3))), r"gives a numpy.ndarray at \[1\]; stages pass on tensors"),
    (lambda: Does(lambda x: (part for part in [x])), "gives a generator; stages pass on tensors"),
    (Forces, r"layer 1 \(Forces\) makes gradients in its forward .*; take recompute='stage', or none"),
    (
        lambda: Does(
            functools.partial(functional.linear, weight=torch.ones(WIDTH, WIDTH, dtype=F, requires_grad=True))
        ),
        "computes with a tensor .* that requires a gradient and is no parameter of its layers",
    ),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED)
def test_what_cannot_be_right_is_refused(layer: Any, message: str) -> None:
    case = Case(lambda: [one.to(F) for one in (linear(), layer(), linear())], plain, options={"cuts": [2]})
    with pytest.raises(ConfigError, match=message):
        launch(piped, case, [(FEW[0], "layer")], workers=2, transport="local", timeout_seconds=30)


def _stepped(model: nn.Module, schedule: Any) -> None:
    given = plain(0)
    Pipeline(model, nn.functional.mse_loss, schedule, optimizer=adamw).step(given.inputs, given.targets)


def test_a_function_that_was_made_with_its_module() -> None:
    """Right while the module is the user's own; a copy of it would compute with another's weights."""
    case = Case(seeded(lambda: [linear(), Lambda(), linear(), Lambda()]), plain)
    agrees(case, 2, schedules=FEW[:2])
    with pytest.raises(ConfigError, match="a gradient and is no parameter of its layers"):
        launch(
            _stepped,
            nn.Sequential(*case.layers()),
            FEW[1],
            workers=2,
            transport="local",
            timeout_seconds=30,
        )


class Own(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2  # type: ignore[no-untyped-call]


def hooked() -> nn.Module:
    model = nn.Sequential(linear(), linear())
    model.register_forward_hook(lambda _, __, output: output * 2)
    return model


def overlapping() -> nn.Module:
    first, second = linear(), linear()
    second.weight = nn.Parameter(first.weight.data[:4])
    return nn.Sequential(first, second)


def listed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, linear())


AT_ONCE: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: Own(linear(), linear()), {}, "the Own has a forward of its own"),
    (hooked, {}, "the Sequential has hooks of its own forward or backward"),
    (overlapping, {}, "weight of layer 1 and weight of layer 0 are two parameters with the same memory"),
    (lambda: listed(torch.jit.trace(linear(), torch.ones(1, WIDTH))), {}, r"layer 0 .* by torch\.jit"),
    (lambda: listed(nn.Embedding(9, WIDTH, scale_grad_by_freq=True)), {}, "has scale_grad_by_freq=True"),
    (
        lambda: listed(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(WIDTH)))),
        {},
        r"layer 0 \(Sequential\) has a SyncBatchNorm, which waits in each forward",
    ),
    (
        lambda: listed(linear()),
        {"loss_function": nn.MSELoss(reduction="sum")},
        "a MSELoss with reduction='sum'",
    ),
    (
        lambda: listed(linear()),
        {"optimizer": torch.optim.LBFGS},
        r"\(LBFGS\) wants closure at each step",
    ),
    (
        lambda: listed(linear()),
        {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
        r"\(ReduceLROnPlateau\) wants metrics at each step",
    ),
]


def _made(model: nn.Module, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"loss_function": nn.functional.mse_loss, "optimizer": adamw}
    Pipeline(model, schedule=FEW[0], **(given | options))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("model", "options", "message"), AT_ONCE)
def test_what_would_train_to_other_numbers_is_refused_at_once(
    model: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(_made, model(), options, workers=2, transport="local", timeout_seconds=30)


class Clamps(nn.Linear):
    """Changes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (schemes.gpipe(2, 4), r"layer 1 \(Clamps\) changes its weight 'weight' .* as it was"),
        (schemes.chimera(2, 4), r"layer 0 \(Clamps\) changes its weight 'weight' .* each of the 2 copies"),
    ],
)
def test_weights_that_a_forward_changes_are_refused(schedule: Any, message: str) -> None:
    case = Case(lambda: [one.to(F) for one in (Clamps(WIDTH, WIDTH), Clamps(WIDTH, WIDTH))], plain)
    with pytest.raises(ConfigError, match=message):
        launch(piped, case, [(schedule, "none")], workers=2, transport="local", timeout_seconds=30)


def test_an_embedding_with_a_largest_norm() -> None:
    """A forward scales it; with copies of its stage that is refused."""
    tokens = Given(torch.arange(16) % 9, numbers(3, 16, WIDTH))
    layers = seeded(lambda: [nn.Embedding(9, WIDTH, max_norm=1.0), linear(), linear(), linear()])
    case = Case(layers, lambda _: tokens)
    agrees(case, 2, schedules=[FEW[0], FEW[3]])
    with pytest.raises(ConfigError, match=r"max_norm=1, which changes its .* each of the 2 copies"):
        launch(piped, case, [(FEW[1], "none")], workers=2, transport="local", timeout_seconds=30)
