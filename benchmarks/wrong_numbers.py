"""Small programs that once trained to other numbers, hung or failed: one process beside the pipeline.

    python benchmarks/wrong_numbers.py [--only WORD] [--trainer] [--keep]

    python benchmarks/wrong_numbers.py --trainer --json "at a commit"

Each program is a few lines that a user might write. It gives one process's numbers and those of the
pipeline, or the sentence with which the pipeline refuses it. ``--trainer`` runs those of the transformers
Trainer too, which takes a minute. ``--keep`` writes benchmarks/results/wrong_numbers.txt: a row for each
program, with what it gave before (from wrong_numbers.json, which ``--json`` writes on an earlier source) and
the test that holds it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TQDM_DISABLE"] = "1"

import torch
from kit import arguments, machine_line
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf

RESULTS = Path(__file__).parent / "results" / "wrong_numbers.txt"
BEFORE = RESULTS.with_suffix(".json")

WIDTH = 6
TWO = "dapple(stages=2, micro_batches=2)"


@dataclass(frozen=True)
class Program:
    """A program that a user might write.

    Attributes:
        name: what it does.
        run: gives one process's numbers and the pipeline's; a text in place of numbers is compared as such.
        test: test that holds what it gives.
        runs: whether a refusal is too strict.
    """

    name: str
    run: Callable[[], tuple[Any, Any]]
    runs: bool = False


PROGRAMS: list[Program] = []


def program(name: str, *, runs: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(name, run, runs))
        return run

    return register


def sgd(parameters: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate)


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def pair(step: int) -> tuple[Tensor, Tensor]:
    return numbers(step, 8, WIDTH), numbers(step + 100, 8, WIDTH)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def plainly(
    model: nn.Module,
    loss: Callable[..., Any] = functional.mse_loss,
    data: Callable[[int], tuple[Any, Any]] = pair,
    change: Callable[[nn.Module], Any] | None = None,
    steps: int = 3,
) -> list[float]:
    """Losses of one process; the user changes something before step 1."""
    optimizer, losses = sgd(model.parameters()), []
    for step in range(steps):
        if step == 1 and change is not None:
            change(model)
        x, y = data(step)
        optimizer.zero_grad()
        with cf.added_losses() as added:
            value = loss(model(x), y)
        value = value + sum(added.values())
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def _train(
    make: Callable[[], Any],
    loss: Any,
    schedule: str,
    data: Callable[[int], tuple[Any, Any]],
    change: Callable[[Any], Any] | None,
    steps: int,
    options: dict[str, Any],
) -> list[float]:
    model = make()
    pipeline = cf.Pipeline(model, loss, schedule, optimizer=sgd, **options)
    losses = {}
    for step in range(steps):
        if step == 1 and change is not None:
            change(model)
        made = pipeline.step(*data(step))
        losses[made.reports_step] = made.loss
    losses |= {made.reports_step: made.loss for made in pipeline.flush()}
    return [losses[step] for step in range(steps)]


def staged(
    make: Callable[[], Any],
    loss: Any = functional.mse_loss,
    schedule: str = TWO,
    data: Callable[[int], tuple[Any, Any]] = pair,
    change: Callable[[Any], Any] | None = None,
    steps: int = 3,
    workers: int = 2,
    **options: Any,
) -> Any:
    """Losses of a pipeline of threads."""
    return launched(_train, make, loss, schedule, data, change, steps, options, workers=workers)


def launched(function: Callable[..., Any], *args: Any, workers: int = 2, seconds: float = 20.0) -> Any:
    """What rank 0 gives, or the sentence with which the launch ends."""
    try:
        return cf.launch(function, *args, workers=workers, transport="local", timeout_seconds=seconds)[0]
    except Exception as error:
        return error


def compared(make: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A model found from an example, on one process and in a pipeline."""
    build = partial(seeded, make)
    usual = {k: v for k, v in options.items() if k in ("loss", "data", "change", "steps")}
    example = options.pop("example", True)
    if example:
        options["example"] = options.get("data", pair)(0)[0]
    return plainly(build(), **usual), staged(build, **options)


def trunk(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


# -- what is set in a recorded model between steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.strength = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.up(x))
        return x + self.strength * self.down(h * 1.4 if self.training else h)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(4))
        self.divisor, self.visible = 1.0, torch.ones(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.visible / self.divisor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute of the model": lambda m: setattr(m, "divisor", 2.5),
    "an attribute of every block": lambda m: [setattr(part, "strength", 0.2) for part in m.parts],
    "a tensor replaced": lambda m: setattr(m, "visible", torch.zeros(WIDTH, dtype=torch.float64)),
    "a tensor zeroed": lambda m: m.visible.zero_(),
    "eval of a block": lambda m: m.parts[2].eval(),
    "a hook on a block": lambda m: m.parts[2].register_forward_hook(lambda _m, _i, o: 2 * o),
    "a block replaced": lambda m: m.parts.__setitem__(2, nn.Identity()),
}
for _name, _change in CHANGES.items():
    program(f"recorded, between steps: {_name}")(partial(compared, Tower, change=_change))


# -- what a recorded forward does


class Forces(nn.Module):
    """An energy, and its gradient by the positions, which are used at the end too."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.out = trunk(6), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = x
        for part in self.parts:
            h = h + torch.tanh(part(h))
        energy = self.out(h + x.pow(2))
        return energy - torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


for _cuts in (None, [3]):
    program(f"recorded: forces by autograd.grad, cuts {_cuts}")(partial(compared, Forces, cuts=_cuts))


class Generated(nn.Module):
    """A layer whose weight another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.code = trunk(), nn.Parameter(torch.ones(3))
        self.maker, self.plain = nn.Linear(3, WIDTH * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        weight = self.maker(self.code).view(WIDTH, WIDTH)
        return torch.func.functional_call(self.plain, {"weight": weight}, (x,))


class Exchanged(nn.Module):
    """A layer that runs once with a weight of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.plain = trunk(), nn.Linear(WIDTH, WIDTH)
        self.guest = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        own, self.plain.weight = self.plain.weight, self.guest
        x = torch.tanh(self.plain(x))
        self.plain.weight = own
        return self.plain(x)


program("recorded: weights given by functional_call")(partial(compared, Generated))
program("recorded: a weight exchanged for a call")(partial(compared, Exchanged))


@lru_cache
def places(count: int) -> Tensor:
    return torch.linspace(-1, 1, count, dtype=torch.float64)


class Placed(nn.Module):
    """A table of places, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = Places(), trunk()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Places(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + places(x.shape[1])


@program("recorded: a table in an lru_cache")
def cached_table() -> tuple[Any, Any]:
    places.cache_clear()
    one = plainly(seeded(Placed))
    places.cache_clear()
    try:
        return one, staged(partial(seeded, Placed), example=pair(0)[0])
    finally:
        places.cache_clear()


@program("recorded: what is left in the cache")
def cache_after() -> tuple[Any, Any]:
    places.cache_clear()
    try:
        cf.layers(seeded(Placed), pair(0)[0])
        return "Tensor", type(places(WIDTH)).__name__
    finally:
        places.cache_clear()


class Asks(nn.Module):
    """A forward that is another one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = trunk()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x if torch.is_grad_enabled() else x.softmax(-1)


class Enables(Asks):
    """A forward that takes gradients in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = super().forward(x)
            return y - torch.autograd.grad(y.sum(), x, create_graph=self.training)[0]


def _predicted(kind: Any) -> tuple[Any, Any]:
    x = pair(0)[0]
    with torch.no_grad():
        one = seeded(kind).eval()(x)[0].tolist()

    def work() -> list[float]:
        pipeline = cf.Pipeline(seeded(kind), nn.MSELoss(), TWO, optimizer=sgd, example=x)
        return pipeline.predict(x)[0].tolist()

    return one, launched(work)


program("recorded: predict of a forward that asks for the grad mode")(partial(_predicted, Asks))
program("recorded: predict of a forward that enables gradients")(partial(_predicted, Enables))


# -- state of two stages


class Normed(nn.Module):
    """One batch norm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class Centers(nn.Module):
    """A layer that writes a running mean, or subtracts it."""

    def __init__(self, mean: Tensor, *, writes: bool) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(WIDTH, WIDTH), writes
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.writes and self.training:
            self.mean.mul_(0.8).add_(0.2 * x.detach().mean(0))
        return x if self.writes else x - self.mean


def _norm_twice() -> nn.Sequential:
    torch.manual_seed(0)
    return Normed().parts.double()


def _mean_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    mean = torch.zeros(WIDTH, dtype=torch.float64)
    layers = nn.Sequential(
        Centers(mean, writes=True), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Centers(mean, writes=False)
    )
    for parameter in layers.parameters():
        parameter.data = parameter.data.double()
    return layers


def _with_evaluation(make: Callable[[], nn.Sequential]) -> tuple[Any, Any]:
    model = make()
    losses = plainly(model)
    model.eval()
    one = [*losses, float(functional.mse_loss(model(pair(9)[0]), pair(9)[1]))]

    def work() -> list[float]:
        pipeline = cf.Pipeline(make(), nn.MSELoss(), "gpipe(stages=2, micro_batches=1)", optimizer=sgd)
        found = [pipeline.step(*pair(step)).loss for step in range(3)]
        return [*found, pipeline.evaluate(*pair(9)).loss]

    return one, launched(work)


program("one batch norm in two stages")(partial(_with_evaluation, _norm_twice))
program("a buffer written in one stage and read in another")(partial(_with_evaluation, _mean_of_two))


def _clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.15, 0.15)


def stack(seed: int = 0, count: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).double()


@program("threads with one model: weights clamped, Chimera")
def clamped() -> tuple[Any, Any]:
    one, model = plainly(stack(), change=_clamp), stack()
    return one, staged(lambda: model, schedule="chimera(stages=2, micro_batches=2)", change=_clamp)


@program("threads with one model: two pipelines share layers, Chimera")
def two_pipelines() -> tuple[Any, Any]:
    def parts() -> list[nn.Sequential]:
        return [stack(1, 2), stack(2, 2), stack(3, 2)]

    body, left, right = parts()
    optimizers = [sgd([*body.parameters(), *head.parameters()]) for head in (left, right)]
    one = []
    for step in range(3):
        for head, optimizer in zip((left, right), optimizers, strict=True):
            optimizer.zero_grad()
            loss = functional.mse_loss(head(body(pair(step)[0])), pair(step)[1])
            loss.backward()
            optimizer.step()
            one.append(float(loss.detach()))
    shared, first, second = parts()

    def work() -> list[float]:
        pipelines = [
            cf.Pipeline(
                nn.Sequential(*shared, *head),
                nn.MSELoss(),
                "chimera(stages=2, micro_batches=2)",
                optimizer=sgd,
                cuts=[2],
            )
            for head in (first, second)
        ]
        return [pipeline.step(*pair(step)).loss for step in range(3) for pipeline in pipelines]

    return one, launched(work)


class Renames(nn.Module):
    """Its state has another name than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

        def rename(_module: nn.Module, state: Any, prefix: str, _local: Any) -> None:
            state[f"{prefix}table"] = state.pop(f"{prefix}inner.weight").t()

        self.register_state_dict_post_hook(rename)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@program("a layer with a state_dict hook that renames", runs=True)
def renamed() -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Renames(), nn.Linear(WIDTH, WIDTH)).double()

    return plainly(make()), staged(make)


# -- losses


def _balanced(o: Tensor, y: Tensor) -> Tensor:
    a, b = functional.mse_loss(o, y), functional.smooth_l1_loss(o, y)
    return a + b * (a.detach() / b.detach())


def _normalised(o: Tensor, y: Tensor) -> Tensor:
    a, b = functional.mse_loss(o, y), functional.l1_loss(o, y)
    return a / a.detach() + b / b.detach()


def _twins(o: Tensor, y: Tensor) -> Tensor:
    a, b = ((v - v.mean(0)) / v.std(0) for v in (o, y))
    return (a.T @ b / len(o) - torch.eye(WIDTH, dtype=torch.float64)).square().mean()


def _hard(o: Tensor, y: Tensor) -> Tensor:
    each = (o - y).square().mean(1)
    return each[each > each.mean()].mean()


def _of(loss: Any, schedule: str = TWO) -> tuple[Any, Any]:
    """Losses, and a weight at the end."""
    model = stack()
    one = [*plainly(model, loss=loss), float(model[0][0].weight.sum())]  # type: ignore[index,union-attr]

    def work() -> list[float]:
        pipeline = cf.Pipeline(stack(), loss, schedule, optimizer=sgd)
        losses = [pipeline.step(*pair(step)).loss for step in range(3)]
        return [*losses, float(pipeline.model_state_dict()["0.0.weight"].sum())]

    return one, launched(work)


program("a loss balanced by detached sizes")(partial(_of, _balanced))
program("a loss divided by itself, detached")(partial(_of, _normalised))
program("Barlow twins, two samples a micro-batch")(partial(_of, _twins, "dapple(stages=2, micro_batches=4)"))
program("hard examples, two samples a micro-batch")(partial(_of, _hard, "dapple(stages=2, micro_batches=4)"))


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cf.add_loss(0.2 * x.square().mean(), "size")
        return self.inner(x)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@program("cf.add_loss in an early stage, and a split backward", runs=True)
def added_and_split() -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Wide(), Adds(), *(Wide() for _ in range(8))).double()

    return plainly(make()), staged(make, schedule="zb-h1(stages=2, micro_batches=4)")


@program("class weights in an asynchronous scheme")
def class_weights() -> tuple[Any, Any]:
    weight = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)

    def data(step: int) -> tuple[Tensor, Tensor]:
        return numbers(step, 12, WIDTH), torch.arange(12) * 5 % WIDTH

    x, y = data(0)
    loss = nn.CrossEntropyLoss(weight)
    with torch.no_grad():
        one = [float(sum(loss(stack()(x[i : i + 4]), y[i : i + 4]) for i in (0, 4, 8)) / 3)]
    got = staged(stack, loss=loss, schedule="pipedream-2bw(stages=2, micro_batches=3)", data=data, steps=1)
    return one, got


# -- slices and generation


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, given: Any) -> Any:
        return self.table(given["ids"]), given["documents"]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.carry = nn.Linear(8, 8), nn.Linear(8, 8), cf.Carry()

    def forward(self, given: Any) -> Any:
        x, documents = given
        heads = [v.unflatten(2, (2, 4)).transpose(1, 2) for v in (self.query(x), self.key(x), x)]
        y = cf.attend(self.carry, *heads, documents=documents)
        return x + y.transpose(1, 2).flatten(2), documents


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 9)

    def forward(self, given: Any) -> Tensor:
        return self.inner(given[0])


def _entropy(o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o.flatten(0, 1), y.flatten())


@program("slices, documents, recompute='stage', one sample a micro-batch", runs=True)
def documents() -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Tokens(), Attends(), Attends(), Scores()).double()

    def data(step: int) -> tuple[Any, Any]:
        ids = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(step))
        return {"ids": ids, "documents": torch.arange(6).expand(2, 6) // 4}, ids.flip(1)

    one = staged(make, loss=_entropy, data=data, steps=2, cuts=[3])
    sliced = "dapple(stages=2, micro_batches=2, slices=2)"
    return one, staged(make, loss=_entropy, schedule=sliced, data=data, steps=2, cuts=[3], recompute="stage")


class OwnKeys(nn.Module):
    """Attention that leaves the keys of its own slice alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.carry = nn.Linear(8, 8), nn.Linear(8, 8), cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        before = self.carry.take()
        self.carry.leave(x)
        known = x if before is None else torch.cat([before, x], 1)
        scores = self.query(x) @ self.key(known).mT
        mask = torch.ones_like(scores[0], dtype=torch.bool).tril(known.shape[1] - x.shape[1])
        return x + scores.masked_fill(~mask, -math.inf).softmax(-1) @ known


class Counts(nn.Module):
    """Positions that begin anew with each slice after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.carry = nn.Embedding(9, 8), nn.Embedding(12, 8), cf.Carry()

    def forward(self, ids: Tensor) -> Tensor:
        first = self.carry.take(0)
        self.carry.leave(ids.shape[1])
        return self.table(ids) + self.places(torch.arange(first, first + ids.shape[1]))


def _sliced(kind: str) -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        first = [nn.Embedding(9, 8), OwnKeys()] if kind == "keys" else [Counts(), nn.Linear(8, 8)]
        return nn.Sequential(*first, nn.Linear(8, 8), nn.Linear(8, 9)).double()

    def data(step: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(step)
        return torch.randint(0, 9, (4, 12), generator=draws), torch.randint(0, 9, (4, 12), generator=draws)

    sliced = "dapple(stages=2, micro_batches=2, slices=3)"
    return plainly(make(), _entropy, data), staged(make, loss=_entropy, schedule=sliced, data=data)


program("three slices, a Carry of the slice's own keys")(partial(_sliced, "keys"))
program("three slices, a Carry with a count that is not added up")(partial(_sliced, "count"))


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


@program("generate: a first call of one token, then layers that look back")
def generated_after_one() -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 8), Sums(), nn.Linear(8, 8), nn.Linear(8, 11)).double()

    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model, ids = make(), prompt
    for _ in range(8):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)

    def work() -> list[int]:
        pipeline = cf.Pipeline(make(), nn.MSELoss(), TWO, optimizer=sgd)
        pipeline.generate(prompt, tokens=1)
        found: list[int] = pipeline.generate(prompt, tokens=8).flatten().tolist()
        return found

    return ids.flatten().tolist(), launched(work)


class After(nn.Module):
    """The token after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(12))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[(ids + 1) % 12]


@program("generate(end=) with two replicas")
def generated_to_the_end() -> tuple[Any, Any]:
    def work() -> list[int]:
        schedule = "gpipe(stages=2, micro_batches=1)"
        pipeline = cf.Pipeline([After(), nn.Identity()], nn.MSELoss(), schedule, optimizer=sgd)
        found: list[int] = (
            pipeline.generate(torch.tensor([[4 + 3 * pipeline.replica]]), tokens=6, end=9).flatten().tolist()
        )
        return found

    return [4, 5, 6, 7, 8, 9, 9], launched(work, workers=4, seconds=8.0)


# -- looks, errors, workers


@program("predict with target_dims of a tree", runs=True)
def predicted_with_a_tree() -> tuple[Any, Any]:
    def loss(o: Tensor, t: Any) -> Tensor:
        return functional.mse_loss(o, t["y"])

    x = pair(0)[0]

    def work() -> list[float]:
        dims = {"y": 0, "weights": None}
        pipeline = cf.Pipeline(stack(), loss, TWO, optimizer=sgd, target_dims=dims)
        return pipeline.predict(x)[0].tolist()

    return stack()(x)[0].tolist(), launched(work)


class Gaps(nn.Module):
    """Gives a tensor with gaps, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return functional.pad(y, (0, 0, 1, 0))[:, :-1], y * 2


class InPlace(nn.Module):
    """Changes one of its inputs by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        first, second = given
        second += self.inner(first)
        return second


@program("recompute='layer' of a layer that takes a tensor with gaps", runs=True)
def with_gaps() -> tuple[Any, Any]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Gaps(), InPlace(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()

    def data(step: int) -> tuple[Tensor, Tensor]:
        return numbers(step, 4, 5, WIDTH), numbers(step + 100, 4, 5, WIDTH)

    return plainly(make(), data=data), staged(make, data=data, recompute="layer")


FAILS = [False]


def _sometimes_infinite(o: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(o, y) + (math.inf if FAILS[0] else 0.0)


@program("the step after a caught infinite loss")
def after_an_error() -> tuple[Any, Any]:
    def work() -> list[float]:
        pipeline = cf.Pipeline(stack(), _sometimes_infinite, TWO, optimizer=sgd)
        pipeline.transport.gather_objects(0)
        FAILS[0] = True
        with contextlib.suppress(cf.WorkerError):
            pipeline.step(*pair(7))
        pipeline.transport.gather_objects(0)
        FAILS[0] = False
        return [pipeline.step(*pair(step)).loss for step in range(3)]

    try:
        return plainly(stack()), launched(work)
    finally:
        FAILS[0] = False


def _disagreeing(act: Callable[[Any], Any]) -> tuple[Any, Any]:
    def work() -> list[float]:
        schedule = "chimera(stages=2, micro_batches=2)"
        pipeline = cf.Pipeline(stack(), nn.MSELoss(), schedule, optimizer=sgd)
        pipeline.step(*pair(0))
        act(pipeline)
        return [pipeline.step(*pair(1)).loss]

    return "a sentence", launched(work)


program("workers that freeze other weights")(
    partial(_disagreeing, lambda p: p.set_trainable(lambda n: p.worker == 0 or not n.startswith("0.")))
)
program("one worker calls set_trainable")(
    partial(_disagreeing, lambda p: p.set_trainable(lambda _: True) if p.worker == 0 else None)
)
program("one worker calls ema")(partial(_disagreeing, lambda p: p.ema(0.9) if p.worker == 0 else None))


@program("timeout_seconds of a pipeline of threads")
def timeout() -> tuple[Any, Any]:
    def work() -> str:
        pipeline = cf.Pipeline(stack(), nn.MSELoss(), TWO, optimizer=sgd, timeout_seconds=2)
        pipeline.step(*pair(0))
        if pipeline.worker == 1:
            return ""
        began = time.perf_counter()
        with contextlib.suppress(cf.CounterflowError):
            pipeline.step(*pair(1))
        return "within 8 s" if time.perf_counter() - began < 8 else "after 8 s"

    return "within 8 s", launched(work, seconds=12.0)


# -- the trainer of transformers


def _trained(kind: str, *, staged: bool) -> list[float]:
    import transformers  # noqa: PLC0415

    from counterflow.integrations.transformers import PipelineArguments, PipelineTrainer  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    base: Any = PipelineTrainer if staged else transformers.Trainer
    arguments: Any = PipelineArguments if staged else transformers.TrainingArguments

    class Own(base):  # type: ignore[misc]
        factor = 0.0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            if kind == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(**inputs)
                loss = out.loss.float()
            else:
                out = model(**inputs)
                factor = {
                    "global_step": self.state.global_step / 4,
                    "epoch": float((self.state.epoch or 0) >= 1),
                    "attribute": self.factor,
                }[kind]
                loss = out.loss + factor * out.logits.square().mean()
            return (loss, out) if return_outputs else loss

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config)
    rows = torch.randint(3, 40, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Own(
            model=model,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            args=arguments(
                output_dir=folder,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                num_train_epochs=3,
                learning_rate=1e-2,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
                **({"pp": 2} if staged else {}),
            ),
        )

        class Anneal(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                trainer.factor += 1.0

        trainer.add_callback(Anneal())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _trainer(kind: str) -> tuple[Any, Any]:
    one = _trained(kind, staged=False)
    try:
        return one, cf.launch(partial(_trained, kind, staged=True), workers=2)[0]
    except Exception as error:
        return one, error


TRAINER = [
    Program(f"PipelineTrainer: compute_loss with {what}", partial(_trainer, kind))
    for kind, what in (
        ("global_step", "self.state.global_step"),
        ("epoch", "self.state.epoch"),
        ("attribute", "an attribute that a callback sets"),
        ("autocast", "autocast"),
    )
]


# -- the table


@dataclass(frozen=True)
class Row:
    """What a program gave.

    Attributes:
        name: of the program.
        one: of one process.
        got: of the pipeline: numbers, or a sentence.
        verdict: what that is.
    """

    name: str
    one: str
    got: str
    verdict: str


def said(value: Any) -> str:
    """Numbers or a sentence, short."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}".replace("\n", " ")
    if isinstance(value, list):
        return ", ".join(f"{each:.5g}" for each in value)
    return str(value)


def verdict(one: Any, got: Any, each: Program) -> str:
    """What a pipeline's numbers or sentence are."""
    from user_programs import is_internal  # noqa: PLC0415

    if isinstance(got, BaseException):
        if "nothing came within" in str(got):
            return "hang"
        if is_internal(got):
            return "internal"
        return "too strict" if each.runs else "refused"
    if isinstance(one, str) or isinstance(got, str):
        return "equal" if one == got else "WRONG"
    tolerance = 3e-5 if each in TRAINER else 1e-9
    near = len(one) == len(got) and all(
        abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(got, one, strict=True)
    )
    return "equal" if near else "WRONG"


def rows(programs: list[Program]) -> Iterator[Row]:
    for each in programs:
        one, got = each.run()
        yield Row(each.name, said(one), said(got), verdict(one, got, each))


def short(text: str, most: int = 220) -> str:
    return (text if len(text) <= most else f"{text[:most]} ...").replace("|", "\\|")


def kept(found: list[Row]) -> list[str]:
    """The table: program, one process, before, after, test."""
    before = (
        json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {"rows": {}, "source": "?"}
    )
    tests = {each.name: TESTS.get(each.name, "") for each in [*PROGRAMS, *TRAINER]}
    counts = {
        v: sum(row.verdict == v for row in found) for v in ("equal", "refused", "WRONG", "internal", "hang")
    }
    lines = [
        machine_line(),
        "",
        ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; before: {before['source']}",
        "",
        "| program | one process | before | after | test |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        old = before["rows"].get(row.name, ["", ""])
        cells = (row.name, short(row.one), f"{old[0]}: {short(old[1])}", f"{row.verdict}: {short(row.got)}")
        lines.append(f"| {' | '.join(cells)} | {tests[row.name]} |")
    return lines


TESTS: dict[str, str] = {
    "recorded, between steps: an attribute of the model": "../capture/test_guards.py::"
    "test_what_changes_counts_from_the_next_step_on",
    "recorded, between steps: an attribute of every block": "../capture/test_guards.py::"
    "test_what_changes_counts_from_the_next_step_on",
    "recorded, between steps: a tensor replaced": "../capture/test_guards.py::"
    "test_what_changes_counts_from_the_next_step_on",
    "recorded, between steps: a tensor zeroed": "../capture/test_guards.py::"
    "test_what_changes_counts_from_the_next_step_on",
    "recorded, between steps: eval of a block": "../capture/test_guards.py::"
    "test_what_changes_counts_from_the_next_step_on",
    "recorded, between steps: a hook on a block": "../capture/test_guards.py::"
    "test_what_cannot_be_recorded_again_is_refused_and_may_be_undone",
    "recorded, between steps: a block replaced": "../capture/test_guards.py::"
    "test_what_cannot_be_recorded_again_is_refused_and_may_be_undone",
    "recorded: forces by autograd.grad, cuts None": "../capture/test_gradients.py::"
    "test_no_stage_begins_within_a_gradient",
    "recorded: forces by autograd.grad, cuts [3]": "../capture/test_gradients.py::"
    "test_no_stage_begins_within_a_gradient",
    "recorded: weights given by functional_call": "../capture/test_gradients.py::"
    "test_losses_are_those_of_one_process",
    "recorded: a weight exchanged for a call": "../capture/test_gradients.py::"
    "test_losses_are_those_of_one_process",
    "recorded: a table in an lru_cache": "../capture/test_effects.py::"
    "test_a_cache_that_a_recording_fills_is_emptied",
    "recorded: what is left in the cache": "../capture/test_effects.py::"
    "test_a_cache_that_a_recording_fills_is_emptied",
    "recorded: predict of a forward that asks for the grad mode": "../capture/test_contexts.py::"
    "test_training_and_prediction_are_those_of_one_process",
    "recorded: predict of a forward that enables gradients": "../capture/test_gradients.py::"
    "test_no_stage_begins_within_a_gradient",
    "a layer with a state_dict hook that renames": "test_state_dict.py::"
    "test_a_layers_state_may_have_other_names_than_its_parameters",
    "recompute='layer' of a layer that takes a tensor with gaps": "stages/test_recomputation.py::"
    "test_a_layer_is_computed_again_with_the_strides_of_its_inputs",
    "workers that freeze other weights": "parameters/test_recipes.py::"
    "test_what_is_refused_alike_changes_nothing",
    "one worker calls set_trainable": "parameters/test_recipes.py::test_a_call_of_one_worker_is_named",
    "one worker calls ema": "parameters/test_recipes.py::test_a_call_of_one_worker_is_named",
    "timeout_seconds of a pipeline of threads": "transport/test_returns.py::"
    "test_a_pipeline_says_how_long_a_thread_waits",
    "PipelineTrainer: compute_loss with self.state.global_step": "../integrations/test_compute_loss.py::"
    "test_what_compute_loss_reads_counts_when_it_changes",
    "PipelineTrainer: compute_loss with self.state.epoch": "../integrations/test_compute_loss.py::"
    "test_what_compute_loss_reads_counts_when_it_changes",
    "PipelineTrainer: compute_loss with an attribute that a callback sets": "../integrations/"
    "test_compute_loss.py::test_what_compute_loss_reads_counts_when_it_changes",
    "PipelineTrainer: compute_loss with autocast": "../integrations/test_compute_loss.py::"
    "test_what_compute_loss_reads_counts_when_it_changes",
    "one batch norm in two stages": "parameters/test_shared_buffers.py::"
    "test_a_shared_buffer_that_a_forward_changes_is_refused",
    "a buffer written in one stage and read in another": "parameters/test_shared_buffers.py::"
    "test_a_shared_buffer_that_a_forward_changes_is_refused",
    "threads with one model: weights clamped, Chimera": "stages/test_set_by_hand.py::"
    "test_all_copies_have_what_is_set",
    "threads with one model: two pipelines share layers, Chimera": "stages/test_set_by_hand.py::"
    "test_two_pipelines_that_share_layers_train_the_same_ones",
    "a loss balanced by detached sizes": "mini_batch/test_loss_diagnoses.py::"
    "test_what_is_no_mean_by_its_gradient_is_refused",
    "a loss divided by itself, detached": "mini_batch/test_loss_diagnoses.py::"
    "test_what_is_no_mean_by_its_gradient_is_refused",
    "Barlow twins, two samples a micro-batch": "mini_batch/test_loss_diagnoses.py::"
    "test_whole_units_are_compared_where_parts_are_not_finite",
    "hard examples, two samples a micro-batch": "mini_batch/test_loss_diagnoses.py::"
    "test_whole_units_are_compared_where_parts_are_not_finite",
    "cf.add_loss in an early stage, and a split backward": "execution/test_added_losses.py::"
    "test_what_is_added_goes_past_the_pieces_of_later_stages",
    "class weights in an asynchronous scheme": "mini_batch/test_mean_losses.py::"
    "test_asynchronous_schemes_refuse_other_shares",
    "slices, documents, recompute='stage', one sample a micro-batch": "execution/test_slices.py::"
    "test_documents_of_lone_samples_in_recomputed_stages",
    "three slices, a Carry of the slice's own keys": "execution/test_slices.py::"
    "test_what_is_wrong_from_the_third_slice_on_is_refused",
    "three slices, a Carry with a count that is not added up": "execution/test_slices.py::"
    "test_what_is_wrong_from_the_third_slice_on_is_refused",
    "generate: a first call of one token, then layers that look back": "test_generation.py::"
    "test_the_first_tokens_after_a_prompt_are_compared",
    "generate(end=) with two replicas": "test_generation.py::"
    "test_replicas_whose_samples_have_ended_wait_for_the_others",
    "predict with target_dims of a tree": "test_predict.py::"
    "test_predictions_need_no_targets_whose_dimensions_are_a_tree",
    "the step after a caught infinite loss": "test_after_errors.py::"
    "test_a_step_that_failed_closes_the_pipeline",
}
"""The test that holds what each program gives, by the program's name; under tests/runtime."""


def main() -> None:
    parser = arguments(__doc__, "wrong_numbers.*")
    parser.add_argument("--only", default="")
    parser.add_argument("--trainer", action="store_true", help="also those of the transformers Trainer")
    parser.add_argument("--json", metavar="SOURCE", help=f"write {BEFORE.name}, of this source")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [p for p in [*PROGRAMS, *(TRAINER if options.trainer else [])] if options.only in p.name]
    found = []
    for row in rows(chosen):
        found.append(row)
        print(
            f"{row.verdict:11}{row.name}\n    one process {row.one}\n    pipeline    {row.got[:400]}",
            flush=True,
        )
    if options.json:
        data = {"source": options.json, "rows": {row.name: [row.verdict, row.got] for row in found}}
        BEFORE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.keep:
        RESULTS.write_text("\n".join(kept(found)) + "\n", encoding="utf-8")
    sys.exit(any(row.verdict not in ("equal", "refused") for row in found))


if __name__ == "__main__":
    main()
