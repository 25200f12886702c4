"""Sequences shared over a dimension of the mesh, compared with one process: run by four processes."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import counterflow as cf
from counterflow.api.carry import NOTHING
from counterflow.api.contexts import Context, Share, gathered, slices_of
from counterflow.models.gpt import GPTBlock, GPTConfig
from counterflow.runtime.mesh.parallel import StageModule
from counterflow.schedule.ir import Schedule

CASES = runpy.run_path(str(Path(__file__).with_name("cases.py")))
mesh_of, page = (CASES[name] for name in ("mesh_of", "page"))
EXPERTS = runpy.run_path(str(Path(__file__).with_name("expert_cases.py")))
PACKED = runpy.run_path(str(Path(__file__).with_name("packed_layers.py")))
D = torch.float64
SEQUENCE, VOCABULARY = 16, 23
close: Any = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    config = GPTConfig(layers=2, hidden=8, heads=2, vocabulary=VOCABULARY, positions=SEQUENCE, dropout=0.0)
    return [layer.to(D) for layer in config.build()]


class Halves(nn.Module):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def halving() -> list[nn.Module]:
    first, block, *rest = layers()
    return [first, block, Halves(), *rest]


def counted(logits: Tensor, labels: Tensor) -> cf.LossSum:
    """Sum over the tokens that count, of which shares have other numbers; labels are shifted already."""
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return cf.LossSum(total, (labels != -100).sum())


def shifting(logits: Tensor, tokens: Tensor) -> cf.LossSum:
    return counted(logits, cf.next_target(tokens, -100))


def by_sample(logits: Tensor, labels: Tensor) -> Tensor:
    return cf.models.loss.next_token_loss(logits, labels)


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which padding does not count, unevenly over the shares."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, 5:] = -100
    labels[1, :3] = -100
    return tokens, labels


def one_process(
    steps: int, loss: Any, inputs: Tensor, targets: Tensor, make: Any = layers
) -> tuple[list[Any], dict[str, Tensor]]:
    model = nn.Sequential(*make())
    optimizer, result = adamw(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        output = loss(model(inputs), targets)
        value = output.sum / output.weight if isinstance(output, cf.LossSum) else output
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for module in model.modules():
            if isinstance(module, cf.TokenBalance):
                module.update()
        result.append((value.item(), norm.item()))
    return result, model.state_dict()


def check(
    schedule: Schedule,
    parallelize: Any,
    *,
    dims: dict[str, int] | None = None,
    replicas: int = 1,
    count: int = 8,
    steps: int = 2,
    loss: Any = counted,
    make: Any = layers,
    reference: Any = None,
    **options: Any,
) -> None:
    """A pipeline over (replica, worker, cp) has the losses, norms and weights of one process."""
    dims = {"cp": 2} if dims is None else dims
    mesh = mesh_of((replicas, schedule.workers, *dims.values()), ("replica", "worker", *dims))
    tokens, labels = batch(count)
    targets = tokens if loss is shifting else labels
    inputs = tokens if reference is None else PACKED["inputs_of"](tokens)
    expected, state = one_process(steps, loss, inputs, targets, reference or make)
    pipeline = cf.Pipeline(
        make(), loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallelize,
        clip_norm=0.1, digest_every=1, **options,
    )  # fmt: skip
    data, context = pipeline.data, pipeline.context
    assert context.count == dims.get("cp", 1)
    mine = [cf.share_sequence(t.chunk(data.count)[data.number], context) for t in (inputs, targets)]
    for number in range(steps):
        evaluated = pipeline.evaluate(*mine).loss
        step = pipeline.step(*mine)
        torch.testing.assert_close((step.loss, step.grad_norm), expected[number], rtol=1e-12, atol=1e-12)
        assert abs(evaluated - step.loss) < 1e-12
    torch.testing.assert_close(pipeline.model_state_dict(), state, rtol=1e-11, atol=1e-11)
    pipeline.close()


def attend_in_slices(carry: cf.Carry, *parts: Tensor, lengths: tuple[int, ...], **masks: Any) -> Tensor:
    """Attention of the slices of a share, one after the other, as a stage runs them."""
    carry.expect_slices(expected=True)
    slices = zip(*(slices_of(tensor, lengths, 2, 2) for tensor in parts), strict=True)
    state, outputs = NOTHING, []
    window = masks.pop("window")
    cut = {name: slices_of(mask, lengths, 1, 2) for name, mask in masks.items()}
    for number, tensors in enumerate(slices):
        carry.begin(state)
        own: dict[str, Any] = {name: of_slices[number] for name, of_slices in cut.items()}
        outputs.append(cf.attend(carry, *tensors, window=window, **own))
        state = carry.end()
    return torch.cat(outputs, 2)


def attention(positions: int, lengths: tuple[int, ...] = (1,)) -> None:
    """Gathered and ring attention beside attention of whole sequences: values and gradients."""
    group = mesh_of((1, 4 // positions, positions), ("replica", "worker", "cp"))["cp"].get_group()
    share = Share(torch.distributed.get_rank(group), positions, lengths)
    generator = torch.Generator().manual_seed(2)
    length = 16

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, heads, length, 4, dtype=D, generator=generator, requires_grad=True)

    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 7, [0] * 12 + [1] * 4])
    seen = torch.ones(2, length, dtype=torch.bool)
    seen[0, 13:] = False
    queries, keys, values = drawn(4), drawn(2), drawn(2)
    upstream = torch.randn(2, 4, length, 4, dtype=D, generator=generator)
    for window in (None, 5):
        forms: list[dict[str, Any]] = [{}, {"documents": documents}, {"documents": documents, "seen": seen}]
        for masks in forms:
            whole = cf.attend(cf.Carry(), queries, keys, values, window=window, **masks)
            expected = torch.autograd.grad(whole, (queries, keys, values), upstream)
            for ring in (False, True):
                context = Context(share, group, ring=ring)
                leaves = (cf.share_sequence(t.detach(), share, 2) for t in (queries, keys, values))
                parts = [leaf.requires_grad_() for leaf in leaves]
                own: dict[str, Any] = {name: cf.share_sequence(mask, share) for name, mask in masks.items()}
                for run in (cf.attend, partial(attend_in_slices, lengths=lengths)):
                    carry = cf.Carry()
                    carry.context = context
                    output = run(carry, *parts, window=window, **own)
                    close(output, cf.share_sequence(whole, share, 2))
                    gradients = torch.autograd.grad(output, parts, cf.share_sequence(upstream, share, 2))
                    for gradient, wanted in zip(gradients, expected, strict=True):
                        close(gradient, cf.share_sequence(wanted, share, 2))
    shared = cf.share_sequence(values, share, 2)
    assert torch.equal(gathered(shared, Context(share, group), 2), values)


class Mixing(nn.Module):
    """A convolution over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.convolution(x.mT).mT
        return x + mixed


class Recurrent(nn.Module):
    """A layer that carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True, dtype=D)
        self.carry = cf.Carry()

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.lstm(x, self.carry.take())
        self.carry.leave(state)
        mixed: Tensor = x + output
        return mixed


class Gated(Mixing):
    """A convolution behind a gate that is closed before the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros((), dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * (super().forward(x) - x)


class Counting(nn.Module):
    """Attention that counts positions, or looks at the position before, in the share alone."""

    def __init__(self, *, shifts: bool) -> None:
        super().__init__()
        self.projection, self.carry, self.shifts = nn.Linear(8, 24, dtype=D), cf.Carry(), shifts

    def forward(self, x: Tensor) -> Tensor:
        moved = functional.pad(x, (0, 0, 1, 0))[:, :-1] if self.shifts else x
        if not self.shifts:
            moved = x + torch.arange(x.shape[1], dtype=D)[:, None].cos()
        parts = self.projection(moved).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return x + cf.attend(self.carry, *parts).transpose(1, 2).flatten(2)


class Normalised(nn.Module):
    """A norm of batches, which counts positions as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(x.mT).mT
        return x + normalised


def refuse() -> None:
    """Lengths and meshes that do not fit."""
    tokens, _ = batch(4)
    with pytest.raises(cf.ConfigError, match=r"a sequence of 6 positions cannot be shared by 2 .* of 4"):
        cf.share_sequence(tokens[:, :6], Share(0, 2))
    with pytest.raises(cf.ConfigError, match=r"a sequence of 8 positions cannot be cut in 3 slices, each"):
        cf.share_sequence(tokens[:, :8], Share(0, 2, (1, 1, 1)))
    mesh, parallel = mesh_of((1, 2, 2), ("replica", "worker", "cp")), cf.ContextParallel("context")
    with pytest.raises(cf.ConfigError, match="no dimension 'context'"):
        cf.Pipeline(
            layers(), counted, cf.schemes.dapple(2, 2), optimizer=adamw, mesh=mesh, parallelize=parallel
        )


def pipeline_of(
    *added: nn.Module, loss: Any = counted, micro_batches: int = 2, slices: int = 1
) -> cf.Pipeline:
    """Two stages, with layers after the first one, whose sequences two positions share."""
    made = layers()
    made[1:1] = added
    mesh, parallel = mesh_of((1, 2, 2), ("replica", "worker", "cp")), cf.ContextParallel("cp")
    schedule = cf.schemes.dapple(stages=2, micro_batches=micro_batches, slices=slices)
    return cf.Pipeline(made, loss, schedule, optimizer=adamw, mesh=mesh, parallelize=parallel)


def step_with(*added: nn.Module, slices: int = 1, steps: int = 1) -> None:
    """A step with a layer that looks across the sequence."""
    pipeline = pipeline_of(*added, slices=slices)
    for _ in range(steps):
        pipeline.step(*(cf.share_sequence(t, pipeline.context) for t in batch(4)))


def gated() -> None:
    step_with(Gated(), steps=2)


def gated_sliced() -> None:
    step_with(Gated(), steps=2, slices=2)


def counting() -> None:
    step_with(Counting(shifts=False))


def looking_back() -> None:
    step_with(Counting(shifts=True))


def normalising() -> None:
    step_with(Normalised())


def skipping() -> None:
    skip = cf.Skip("around")
    step_with(nn.Sequential(skip.saver(), Mixing()), nn.Sequential(skip.loader(), Added()))


class Added(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1]


def mixing() -> None:
    step_with(Mixing())


def recurrent() -> None:
    step_with(Recurrent())


def mixing_sliced() -> None:
    step_with(Mixing(), slices=2)


def recurrent_sliced() -> None:
    step_with(Recurrent(), slices=2)


def steps_with_loss(loss: Any, *, steps: int = 1, micro_batches: int = 2, slices: int = 1) -> None:
    """Steps of which the last one has padding."""
    pipeline = pipeline_of(loss=loss, micro_batches=micro_batches, slices=slices)
    tokens, labels = batch(4)
    for number in range(steps):
        targets = labels if loss is mean and number == steps - 1 else tokens
        pipeline.step(*(cf.share_sequence(t, pipeline.context) for t in (tokens, targets)))


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels of a share that count; torch's own is summed exactly."""
    losses = functional.cross_entropy(logits.mT, labels, reduction="none")
    return losses.sum() / (labels != -100).sum()


def preference(logits: Tensor, labels: Tensor) -> Tensor:
    """A function of the sum over positions, as of direct preference optimization."""
    losses = functional.cross_entropy(logits.mT, labels, reduction="none")
    return -functional.logsigmoid(-losses.sum(1)).mean()


def shifting_shared() -> None:
    """Labels that are shifted within the share: the first label of the next share is left out."""
    steps_with_loss(local_shift)


def shifting_sliced() -> None:
    """Labels that are shifted within the slice of a share."""
    steps_with_loss(local_shift, slices=2)


def preference_shared() -> None:
    """One micro-batch, with which nothing else of a loss is compared."""
    steps_with_loss(preference, micro_batches=1)


def padded_later() -> None:
    """A mean over labels that count, which is one over positions in a first step without padding."""
    steps_with_loss(mean, steps=2)


def padded_later_sliced() -> None:
    """The same in slices."""
    steps_with_loss(mean, steps=2, slices=2)


def shapes_differ() -> None:
    """Other lengths at the second position, in a step of a known shape."""
    pipeline = pipeline_of()
    shares = [cf.share_sequence(t, pipeline.context) for t in batch(4)]
    pipeline.step(*shares)
    pipeline.step(*(t[:, :6] if pipeline.context.number else t for t in shares))


def micro_batches_differ() -> None:
    """Other micro-batches at the second position."""
    pipeline = pipeline_of()
    tokens, labels = (cf.share_sequence(t, pipeline.context) for t in batch(4))
    sizes = [1, 3] if pipeline.context.number else [2, 2]
    pipeline.step(micro_batches=zip(tokens.split(sizes), labels.split(sizes), strict=True))


def samples_differ() -> None:
    """Each position is given a share of samples of its own, as if it were a replica."""
    pipeline = pipeline_of()
    inputs, targets = (t.chunk(pipeline.replicas)[pipeline.replica] for t in batch(4))
    pipeline.step(*(cf.share_sequence(t, pipeline.context) for t in (inputs, targets)))


def unshared() -> None:
    """Each position is given whole sequences."""
    pipeline = pipeline_of()
    with pytest.raises(cf.ConfigError, match="generate adds token after token"):
        pipeline.generate(batch(4)[0], tokens=2)
    pipeline.step(*(t[:, :8] for t in batch(4)))


def expert_layers() -> list[nn.Module]:
    """Layers with attention, and layers of experts between them."""
    moe, made = EXPERTS["Moe"], layers()
    for place in (2, 1):
        torch.manual_seed(place)
        made.insert(place, moe(balance=True, width=8))
    return made


def tensor_parallel(stage: StageModule, mesh: DeviceMesh) -> None:
    """Divide the feed-forwards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in stage:
        if isinstance(layer, GPTBlock):
            plan: dict[str, Any] = {
                "feed_forward.expand": ColwiseParallel(), "feed_forward.contract": RowwiseParallel(),
            }  # fmt: skip
            parallelize_module(layer, mesh["tp"], plan)


def eight() -> None:
    """Two stages, experts over two positions, and sequences over two more, or tensor parallelism."""

    def both(stage: StageModule, mesh: DeviceMesh) -> None:
        cf.ContextParallel("cp")(stage, mesh)
        cf.ExpertParallel("ep", fully_shard=("cp", "ep"))(stage, mesh)

    def tensors(stage: StageModule, mesh: DeviceMesh) -> None:
        tensor_parallel(stage, mesh)
        cf.ExpertParallel("ep", fully_shard="ep")(stage, mesh)

    for schedule in (cf.schemes.dapple(2, 2), cf.schemes.zb_h1(2, 2)):
        check(schedule, both, dims={"cp": 2, "ep": 2}, make=expert_layers)
    check(cf.schemes.dapple(2, 2), tensors, dims={"ep": 2, "tp": 2}, make=expert_layers)


def local_shift(logits: Tensor, tokens: Tensor) -> cf.LossSum:
    """A wrong way: the first labels of the next share are left out, and the tail follows the head."""
    return counted(logits[:, :-1], tokens[:, 1:])


def four() -> None:
    schemes, parallel = cf.schemes, cf.ContextParallel("cp")
    ring = cf.ContextParallel("cp", ring=True)
    sharded = cf.ContextParallel("cp", fully_shard="cp")
    for lengths in ((1,), (1, 1), (1, 2, 1)):
        attention(2, lengths)
    attention(4)
    attention(4, (1, 1))
    check(schemes.dapple(2, 2), parallel)
    check(schemes.dapple(2, 2), ring, loss=by_sample, recompute="layer")
    check(schemes.zb_h1(2, 4), sharded, loss=shifting)
    check(schemes.chimera(2, 2), sharded, recompute="stage")
    check(schemes.interleaved(2, 4, 2), ring)
    check(schemes.gpipe(1, 2), ring, dims={"cp": 4}, loss=by_sample)
    check(
        schemes.gpipe(1, 2), cf.ContextParallel("cp", fully_shard=("shard", "cp")), dims={"shard": 2, "cp": 2}
    )
    check(schemes.dapple(2, 2), parallel, make=halving, recompute="layer")
    check(schemes.dapple(1, 2), parallel, replicas=2)
    check(schemes.dapple(2, 2), parallel, replicas=2, dims={"cp": 1})
    refuse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(torch.distributed.get_rank()))
        assert len(page("long-contexts.md", 10)) == 3


def sliced() -> None:
    """Slices of sequences that are shared, of equal and of other lengths."""
    schemes, parallel = cf.schemes, cf.ContextParallel("cp")
    ring = cf.ContextParallel("cp", ring=True)
    check(schemes.gpipe(stages=2, micro_batches=2, slices=2), parallel)
    check(schemes.dapple(stages=2, micro_batches=2, slices=2), ring, loss=shifting, recompute="layer")
    check(
        schemes.dapple(stages=2, micro_batches=2, slices=(3, 5)), parallel, loss=by_sample, recompute="stage"
    )
    check(schemes.zb_h1(stages=2, micro_batches=2, slices=(4, 8, 4)), ring, loss=by_sample)
    check(
        schemes.zb_v(workers=2, micro_batches=2, slices=2),
        cf.ContextParallel("cp", fully_shard="cp"),
        loss=shifting,
    )
    check(schemes.chimera(stages=2, micro_batches=2, slices=2), parallel)
    check(schemes.gpipe(stages=1, micro_batches=2, slices=2), ring, dims={"cp": 4}, loss=shifting)
    for schedule in (schemes.dapple(2, 2), schemes.zb_h1(stages=2, micro_batches=2, slices=(1, 1, 2))):
        check_packed(schedule, parallel, recompute="layer")
        check_packed(schedule, ring, loss=shifting)
    saved()
    slices = schemes.zb_h1(stages=2, micro_batches=2, slices=2)
    check(slices, tensor_parallel, dims={"tp": 2})
    check(slices, cf.ExpertParallel("ep", fully_shard="ep"), dims={"ep": 2}, make=expert_layers)


def saved() -> None:
    """A position saves a share of what one process saves, however keys and values are exchanged."""

    def peak(positions: int, slices: int, *, ring: bool = False) -> int:
        mesh = mesh_of((2 // positions, 2, positions), ("replica", "worker", "cp"))
        schedule = cf.schemes.dapple(stages=2, micro_batches=2, slices=slices)
        with cf.Pipeline(
            layers(), counted, schedule, optimizer=adamw, mesh=mesh,
            parallelize=cf.ContextParallel("cp", ring=ring),
        ) as pipeline:  # fmt: skip
            data = pipeline.data
            shares = [cf.share_sequence(t.chunk(data.count)[data.number], pipeline.context) for t in batch(8)]
            pipeline.step(*(t[:4] for t in shares))
            peaks: Any = pipeline.transport.gather_objects(pipeline.peak_saved_bytes)
            return int(max(peaks))

    for slices in (1, 2):
        whole, gathered_share, ring_share = peak(1, slices), peak(2, slices), peak(2, slices, ring=True)
        assert gathered_share == ring_share
        assert abs(2 * ring_share - whole) <= 64, (whole, ring_share)


def check_packed(schedule: Schedule, parallelize: Any, **options: Any) -> None:
    """Windows, packed documents and padding of a user's layers, compared with plain torch."""
    make = PACKED["layers"]
    check(schedule, parallelize, make=make, reference=partial(make, plain=True), **options)
