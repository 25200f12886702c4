"""Models of many kinds: experts, images, speech, graphs, sets, tasks side by side; in few schedules each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from counterflow import Skip, schemes

from .alone import Case, F, Given, agrees, numbers, seeded
from .models import WIDTH, First, Mlp

FEW = [
    schemes.dapple(2, 4),
    schemes.chimera(2, 8, concat="forward-doubling"),
    schemes.chimera(2, 8, concat="backward-halving"),
    schemes.zb_v(2, 4),
    schemes.interleaved(2, 4, chunks=2),
]


def drawn(step: int, high: int, *shape: int) -> Tensor:
    """Some whole numbers of a step's own."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(step))


class Experts(nn.Module):
    """Each position goes to the two best of four experts; one may get nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero(as_tuple=True)
            if len(where[0]):
                part = expert(x[where[:-1]]) * weight[where][:, None]
                found = found.index_put(where[:-1], part, accumulate=True)
        return x + found


class Patches(nn.Module):
    """An image to patches, with a token of the class before them."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place


class Encodes(nn.TransformerEncoderLayer):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class OfClass(nn.Linear):
    """The class of the first token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


class Hears(nn.Module):
    """Time before samples, as recurrent layers of old take it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0]
        return found + x


def transcribed(output: Tensor, target: Any) -> Tensor:
    """Connectionist temporal classification, of transcripts of their own lengths."""
    texts, lengths = target
    steps = torch.full((output.shape[1],), output.shape[0])
    return functional.ctc_loss(output.log_softmax(2), texts, steps, lengths, zero_infinity=True)


class Passes(nn.Module):
    """Messages along the edges of graphs that all have as many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, graph: dict[str, Tensor]) -> dict[str, Tensor]:
        x, edges = graph["x"], graph["edges"]
        rows = torch.arange(len(x))[:, None]
        pairs = torch.cat([x[rows, edges[..., 0]], x[rows, edges[..., 1]]], -1)
        flat = (edges[..., 1] + rows * x.shape[1]).flatten()
        got = x.new_zeros(x.shape[0] * x.shape[1], WIDTH).index_add(
            0, flat, self.message(pairs).flatten(0, 1)
        )
        return {**graph, "x": self.update(got, x.flatten(0, 1)).view_as(x)}


class Pools(nn.Linear):
    """A graph as its largest node."""

    def forward(self, graph: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(graph["x"].amax(1))


class Denoises(nn.Module):
    """Is told at what time, and hands that on; its weights are scaled by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = Mlp(), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, given: Any, *, time: Tensor | None = None) -> Any:
        x, at = given if time is None else (given, time)
        if time is not None:
            at = torch.sin(time[:, None] * torch.arange(1, WIDTH + 1, dtype=F))
        scale, shift = self.scale(at).chunk(2, 1)
        return self.body(x) * (1 + scale) + shift, at


class Reversible(torch.autograd.Function):
    """Two halves that each change the other; the input is computed from the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        a = a + torch.tanh(b @ one)
        b = b + torch.tanh(a @ two)
        ctx.save_for_backward(a, b, one, two)
        return torch.cat([a, b], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b, one, two = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            tail = torch.tanh(a @ two)
        with torch.no_grad():
            before = (b - tail).requires_grad_()
        da, db = gradients[0].chunk(2, 1)
        more, dtwo = torch.autograd.grad(tail, (a, two), db)
        with torch.enable_grad():
            head = torch.tanh(before @ one)
        da = da + more
        less, done = torch.autograd.grad(head, (before, one), da)
        return torch.cat([da, db + less], 1), done, dtwo


class Turns(nn.Module):
    """A reversible layer."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.one, self.two = (nn.Parameter(torch.randn(half, half) / 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Reversible.apply(x, self.one, self.two)  # type: ignore[no-untyped-call]
        return found


class Makes(nn.Module):
    """Weights of its own layer for each sample, from the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.parts = nn.ParameterDict({"bias": torch.zeros(WIDTH), "scale": torch.ones(())})
        self.more = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x).view(-1, WIDTH, WIDTH)
        y = torch.einsum("ni,nij->nj", x, weight) * self.parts["scale"] + self.parts["bias"]
        found: Tensor = torch.tanh(y) * self.more[0] + self.more[1] + x
        return found


class Settles(nn.Module):
    """A fixed point, found without a graph, and one step with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = torch.tanh(0.5 * self.inner(z) + x)
        found: Tensor = torch.tanh(0.5 * self.inner(z) + x)
        return found


class Tasks(nn.Module):
    """Heads side by side, of values of their own names."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"value": nn.Linear(WIDTH, 2), "label": nn.Linear(WIDTH, 3)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


def tasks(output: dict[str, Tensor], target: dict[str, Tensor]) -> Any:
    mean, variance = output["value"].unbind(1)
    value = functional.gaussian_nll_loss(mean, target["value"], functional.softplus(variance))
    label = functional.binary_cross_entropy_with_logits(
        output["label"], target["label"], pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=F)
    )
    return value + 0.3 * label, {"value": value.detach()}


def focal(output: Tensor, target: Tensor) -> Tensor:
    """By hand, of losses one by one."""
    each = functional.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


class Sets(nn.Module):
    """Queries that attend to a set, and none of the order of it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries[:, None].expand(-1, x.shape[1], -1)
        found: Tensor = self.attention(queries, x, x, need_weights=False)[0]
        return torch.cat([x, found])


class Down(nn.Module):
    """Half of an image's sides, and what is lost by a skip."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.save, self.conv = skip.saver(), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = functional.silu(self.norm(self.conv(self.save(x))))
        return found


class Up(nn.Module):
    """Back."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.load, self.conv = skip.loader(), nn.ConvTranspose2d(4, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y, before = self.load(self.conv(x))
        found: Tensor = y + before
        return found


def unet() -> list[nn.Module]:
    outer, inner = Skip("outer"), Skip("inner")
    return [Down(outer), Down(inner), nn.Conv2d(4, 4, 1), Up(inner), Up(outer)]


def pairs(output: Tensor, target: Tensor) -> Tensor:
    one, two = output.unbind(1)
    return functional.cosine_embedding_loss(one, two, target, margin=0.1)


class Many(nn.AdaptiveLogSoftmaxWithLoss):
    """torch's softmax for many classes, the last layer with labels that are handed on."""

    def forward(self, given: Any) -> Any:  # type: ignore[override]
        x, labels = given
        return {"loss": super().forward(x, labels).loss}


class WithLabels(Mlp):
    """Hands labels on."""

    def forward(self, given: Any) -> Any:
        return super().forward(given[0]), given[1]


class Mlp4(nn.Module):
    """A product of two linear layers over four patches."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        found: Tensor = x + self.both(x, x.flip(2).contiguous())
        return found.transpose(1, 2)


def plain(step: int) -> Given:
    return Given(numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH))


def graphs(step: int) -> Given:
    graph = {"x": numbers(step, 16, 5, WIDTH), "edges": drawn(step, 5, 16, 7, 2)}
    return Given(graph, numbers(step + 100, 16, WIDTH))


def both_targets(step: int) -> Given:
    return Given(
        numbers(step, 16, WIDTH), {"value": numbers(step + 1, 16), "label": drawn(step, 2, 16, 3).to(F)}
    )


CASES = {
    "experts": Case(
        seeded(lambda: [Experts() for _ in range(4)]),
        lambda step: Given(numbers(step, 16, 3, WIDTH), numbers(step + 100, 16, 3, WIDTH)),
    ),
    "patches of images": Case(
        seeded(lambda: [Patches(), Encodes(), Encodes(), OfClass(WIDTH, WIDTH)]),
        lambda step: Given(numbers(step, 16, 3, 8, 8), drawn(step, WIDTH, 16)),
        nn.functional.cross_entropy,
    ),
    "speech, samples second": Case(
        seeded(lambda: [Hears() for _ in range(4)]),
        lambda step: Given(
            numbers(step, 9, 16, WIDTH), (drawn(step, WIDTH - 1, 16, 3) + 1, drawn(step, 3, 16) + 1)
        ),
        transcribed,
        options={"input_dims": 1},
        halves=False,
    ),
    "graphs": Case(seeded(lambda: [*(Passes() for _ in range(4)), Pools(WIDTH, WIDTH)]), graphs),
    "diffusion": Case(
        seeded(lambda: [*(Denoises() for _ in range(4)), First()]),
        lambda step: Given(
            numbers(step, 16, WIDTH), numbers(step + 100, 16, WIDTH), {"time": numbers(step, 16).abs()}
        ),
    ),
    "reversible layers": Case(seeded(lambda: [Turns() for _ in range(4)]), plain, modes=("none", "stage")),
    "layers that make weights": Case(seeded(lambda: [Makes() for _ in range(4)]), plain),
    "fixed points": Case(seeded(lambda: [Settles() for _ in range(4)]), plain),
    "tasks side by side": Case(seeded(lambda: [*(Mlp() for _ in range(4)), Tasks()]), both_targets, tasks),
    "focal loss by hand": Case(
        seeded(lambda: [Mlp() for _ in range(4)]),
        lambda step: Given(numbers(step, 16, WIDTH), drawn(step, WIDTH, 16)),
        focal,
    ),
    "sets, samples second": Case(
        seeded(lambda: [nn.Linear(WIDTH, WIDTH), Sets(), Sets(), nn.Linear(WIDTH, WIDTH)]),
        lambda step: Given(numbers(step, 3, 16, WIDTH), numbers(step + 100, 7, 16, WIDTH)),
        options={"input_dims": 1, "target_dims": 1},
    ),
    "a u-net of norms by groups": Case(
        seeded(unet), lambda step: Given(numbers(step, 16, 4, 8, 8), numbers(step + 100, 16, 4, 8, 8))
    ),
    "pairs": Case(
        seeded(lambda: [Mlp() for _ in range(4)]),
        lambda step: Given(numbers(step, 16, 2, WIDTH), drawn(step, 2, 16) * 2 - 1),
        pairs,
    ),
    "a softmax for many classes": Case(
        seeded(lambda: [*(WithLabels() for _ in range(4)), Many(WIDTH, 20, [4, 10], div_value=2.0)]),
        lambda step: Given((numbers(step, 16, WIDTH), drawn(step, 20, 16))),
        None,
    ),
    "bilinear layers of unfolded images": Case(
        seeded(lambda: [nn.Unfold(2, stride=2), Mlp4(), Mlp4(), nn.Fold((4, 4), 2, stride=2)]),
        lambda step: Given(numbers(step, 16, 1, 4, 4), numbers(step + 100, 16, 1, 4, 4)),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_as_in_one_process(case: Case) -> None:
    agrees(case, 2, schedules=FEW)
