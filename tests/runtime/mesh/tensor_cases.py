"""Built-in models on meshes of ``cf.MeshDegrees``, compared with one process: run by four processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.measure.stages.timing import measure_stages
from counterflow.models.bert import BERTConfig
from counterflow.models.gpt import GPTConfig
from counterflow.runtime.assembly.rehearsal import rehearse

SHAPE: dict[str, Any] = {
    "layers": 2, "hidden": 8, "heads": 4, "vocabulary": 23, "positions": 8, "dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, GPTConfig | BERTConfig] = {
    "gpt": GPTConfig(**SHAPE),
    "bert": BERTConfig(**SHAPE, next_sentence=False),
    "moe": GPTConfig(**SHAPE, experts=4),
}
adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def layers(kind: str) -> list[nn.Module]:
    torch.manual_seed(3)
    return [layer.double() for layer in MODELS[kind].build()]


def batch(kind: str) -> tuple[Any, Any]:
    return MODELS[kind].sample(8, generator=torch.Generator().manual_seed(1))


def one_process(kind: str, steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model, (inputs, targets) = nn.Sequential(*layers(kind)), batch(kind)
    optimizer, numbers = adamw(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = MODELS[kind].loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for module in model.modules():
            if isinstance(module, cf.TokenBalance):
                module.update()
        numbers.append((loss.item(), norm.item()))
    return numbers, model.state_dict()


def check(
    kind: str,
    schedule: Any,
    degrees: cf.MeshDegrees,
    *,
    replicas: int = 1,
    measures: bool = False,
    **options: Any,
) -> cf.Pipeline:
    """Three steps, their norms and weights; with ``measures`` stages are measured before."""
    mesh = degrees.options(replicas, schedule.workers)
    model, loss = layers(kind), MODELS[kind].loss
    pipeline = cf.Pipeline(model, loss, schedule, optimizer=adamw, clip_norm=0.1, **mesh, **options)

    def part(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(part, value))
        samples = value.chunk(pipeline.data.count)[pipeline.data.number]
        return cf.share_sequence(samples, pipeline.context)

    inputs, targets = map(part, batch(kind))
    if measures:
        measure_stages(pipeline, inputs, targets, repeats=1)
    numbers, weights = one_process(kind, 3)
    for expected in numbers:
        step = pipeline.step(inputs, targets)
        torch.testing.assert_close((step.loss, step.grad_norm), expected, rtol=1e-12, atol=1e-12)
    state = pipeline.model_state_dict()
    if pipeline.transport.rank == 0:
        torch.testing.assert_close(state, {name: weights[name] for name in state}, rtol=1e-10, atol=1e-12)
    return pipeline


class Routed(nn.Module):
    """A layer whose router has another dtype, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.router = nn.Linear(8, 8, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.linear(x) * self.router(x.float()).sigmoid()
        return output


def dtypes() -> None:
    """Weights of two dtypes in a layer are sharded by themselves."""

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Routed() for _ in range(4)]

    inputs = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(*made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = cf.Pipeline(
        made(),
        nn.functional.mse_loss,
        cf.schemes.dapple(2, 4),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        **cf.MeshDegrees(dp_shard=2).options(1, 2),
    )
    part = inputs.chunk(2)[pipeline.data.number]
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        loss.backward()
        optimizer.step()
        assert abs(pipeline.step(part, part.flip(1)).loss - loss.item()) < 1e-7


def four() -> list[str]:
    """The tables of two cases, on which their ranks agree."""
    tensors = cf.MeshDegrees(tp=2)
    for schedule in SCHEDULES:
        check("gpt", schedule, tensors)
    check("gpt", SCHEDULES[0], tensors, recompute="layer")
    check("bert", SCHEDULES[0], tensors)
    dtypes()
    stage = cf.schemes.dapple(1, 4)
    for degrees in (
        cf.MeshDegrees(dp_shard=2, tp=2),
        cf.MeshDegrees(cp=2, tp=2),
        cf.MeshDegrees(dp_shard=2, cp=2),
    ):
        check("gpt", stage, degrees, measures=True)
    for degrees in (
        cf.MeshDegrees(dp_shard=2, tp=2, ep=2),
        cf.MeshDegrees(dp_shard=2, tp=2, ep=4),
        cf.MeshDegrees(cp=2, tp=2, ep=4),
        cf.MeshDegrees(tp=4, ep=2),
    ):
        check("moe", stage, degrees)
    check("gpt", stage, cf.MeshDegrees(dp_shard=2), replicas=2, measures=True)
    dense = check("gpt", SCHEDULES[0], cf.MeshDegrees(dp_shard=2), measures=True)
    routed = check("moe", SCHEDULES[0], cf.MeshDegrees(tp=2, ep=2), recompute="layer")
    return [str(dense.explain()), str(routed.explain())]


SCHEDULES: Sequence[Any] = (
    cf.schemes.dapple(2, 4),
    cf.schemes.zb_h1(2, 4),
    cf.schemes.chimera(2, 4),
    cf.schemes.interleaved(2, 4, chunks=2),
)


class Fixed(nn.Module):
    """Attention that makes a fixed number of heads, whatever its part of the features."""

    tensor_parallel_plan: ClassVar = {"inputs": "colwise", "outputs": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(x).unflatten(-1, (2, -1)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(heads, heads, heads)
        mixed: Tensor = x + self.outputs(seen.transpose(1, 2).flatten(2))
        return mixed


class Normalised(Fixed):
    """A norm over the features, of which each position has a part."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.outputs.weight)  # the first update opens it

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inputs(x)
        mixed: Tensor = x + self.outputs(hidden.relu() / hidden.square().mean(-1, keepdim=True).sqrt())
        return mixed


class Viewing(nn.Linear):
    """A layer that leaves a size to torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1, 8))


def step_with(layer: nn.Module, degrees: cf.MeshDegrees, *, samples: int = 4, steps: int = 1) -> None:
    torch.manual_seed(0)
    schedule, sgd = cf.schemes.gpipe(1, 2), partial(torch.optim.SGD, lr=0.1)
    made = [nn.Linear(8, 8), layer, nn.Linear(8, 8)]
    pipeline = cf.Pipeline(made, nn.MSELoss(), schedule, optimizer=sgd, **degrees.options(1, 1))
    for _ in range(steps):
        x = torch.randn(samples, 4, 8).tensor_split(pipeline.data.count)[pipeline.data.number]
        pipeline.step(x, x)


def fixed_heads() -> None:
    step_with(Fixed(), cf.MeshDegrees(tp=2))


def norm_of_parts() -> None:
    step_with(Normalised(), cf.MeshDegrees(tp=2), steps=3)


def view_of_nothing() -> None:
    step_with(Viewing(8, 8), cf.MeshDegrees(dp_shard=2), samples=3)


def rehearsed() -> list[str]:
    """The tables of the last two cases, without their ranks."""
    cut = {"schedule": SCHEDULES[0], "list_layers": None, "cuts": None}
    cases = ("gpt", cf.MeshDegrees(dp_shard=2)), ("moe", cf.MeshDegrees(tp=2, ep=2))
    return [str(rehearse(layers(kind), degrees, 1, **cut).table) for kind, degrees in cases]
