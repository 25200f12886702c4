"""Skips: what a layer saves for a later one, past the layers between, as in one process."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.program.actions import Send
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.skip_links import links_of, stage_skips
from counterflow.schedule import schemes
from counterflow.schedule.ir import Schedule, SkipLink
from counterflow.verification.training_agreement import TrainingAgreement, verify

from ...kit import run, sgd

F = torch.float64

SCHEMES = [
    schemes.gpipe(4, 4, groups=2),
    schemes.dapple(4, 4),
    schemes.interleaved(2, 4, chunks=2),
    schemes.gems(4, 4),
    schemes.chimera(4, 4),
    schemes.chimera(4, 4, concat="forward-doubling"),
    schemes.chimera(4, 4, concat="backward-halving"),
    schemes.mixpipe(4, 4, injected="max"),
    schemes.hanayo(2, 4, waves=1),
    schemes.hanayo(3, 4, waves=1),
    schemes.zb_v(2, 4),
]
MODES = ["none", "stage", "layer"]


class Down(nn.Module):
    """Keeps what it made for the way up, and halves the picture."""

    def __init__(self, inside: int, outside: int, skip: cf.Skip) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, outside, 3, padding=1, dtype=F)
        self.keep = skip.saver()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool1d(self.keep(torch.tanh(self.conv(x))), 2)


class Up(nn.Module):
    def __init__(self, inside: int, outside: int, skip: cf.Skip) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, outside, 3, padding=1, dtype=F)
        self.kept = skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(x, scale_factor=2)
        return torch.tanh(self.conv(torch.cat([self.kept(), x], 1)))


def unet() -> list[nn.Module]:
    """Eight layers: in four stages one skip is within a stage's next, two go over stages, one is nested."""
    torch.manual_seed(1)
    skips = [cf.Skip(f"level {i}") for i in range(3)]
    return [
        Down(1, 2, skips[0]),
        Down(2, 3, skips[1]),
        Down(3, 4, skips[2]),
        nn.Conv1d(4, 4, 3, padding=1, dtype=F),
        nn.ELU(inplace=True),
        Up(8, 3, skips[2]),
        Up(6, 2, skips[1]),
        Up(4, 1, skips[0]),
    ]


class Encoder(nn.Module):
    """Ends with its memory for all decoders, and hands on what these begin with."""

    def __init__(self, memory: cf.Skip, begin: cf.Skip) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F)
        self.memory, self.begin = memory.saver(), begin.loader()

    def forward(self, x: Tensor) -> Tensor:
        self.memory({"keys": torch.tanh(self.linear(x)), "values": [x, 2.5]})
        begin: Tensor = self.begin()
        return begin


class Decoder(nn.Module):
    def __init__(self, memory: cf.Skip) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F)
        self.memory = memory.loader()

    def forward(self, x: Tensor) -> Tensor:
        x, memory = self.memory(self.linear(x))
        values, scale = memory["values"]
        return torch.tanh(x * memory["keys"] + values / scale)


class Split(nn.Module):
    def __init__(self, begin: cf.Skip) -> None:
        super().__init__()
        self.linear, self.begin = nn.Linear(4, 8, dtype=F), begin.saver()

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.linear(x).chunk(2, -1)
        self.begin(target)
        result: Tensor = source
        return result


def encoder_decoder() -> list[nn.Module]:
    torch.manual_seed(2)
    memory, begin = cf.Skip("memory"), cf.Skip("begin")
    linear = nn.Linear(4, 4, dtype=F)
    return [Split(begin), linear, Encoder(memory, begin), *(Decoder(memory) for _ in range(5))]


MODELS = {"unet": unet, "encoder-decoder": encoder_decoder}


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (9, 1, 16) if name == "unet" else (9, 4)
    return (
        torch.randn(shape, dtype=F, generator=generator),
        torch.randn(shape, dtype=F, generator=generator),
    )


def train(
    layers: list[nn.Module], name: str, schedule: Schedule, mode: Any, **options: Any
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    pipeline = Pipeline(
        layers,
        nn.MSELoss(),
        schedule,
        optimizer=sgd,
        costs=[1] * 8,
        recompute=mode,
        digest_every=1,
        **options,
    )
    inputs, targets = data(name)
    losses = [step.loss for step in (pipeline.step(inputs, targets) for _ in range(2))]
    losses.append(pipeline.step(inputs[:3], targets[:3]).loss)  # fewer samples than micro-batches
    return losses, pipeline.model_state_dict(), pipeline.predict(inputs)


def plain(name: str) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Plain PyTorch: the same layers, one after another."""
    model = nn.Sequential(*MODELS[name]()).train()
    optimizer = sgd(list(model.parameters()))
    inputs, targets = data(name)
    losses = []
    for count in (9, 9, 3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[:count]), targets[:count])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict()), model(inputs).detach()


def agree(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.table
@pytest.mark.parametrize("schedule", SCHEMES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_skips_are_as_in_one_process(name: str, schedule: Schedule, mode: Any) -> None:
    for found in run(train, MODELS[name](), name, schedule, mode, workers=schedule.workers):
        agree(found, plain(name))


@pytest.mark.table
@pytest.mark.parametrize(
    "schedule", [schemes.pipedream(4), schemes.pipedream_2bw(4, 4), schemes.wpipe(4, 4)], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_skips_without_a_flush(schedule: Schedule, mode: Any) -> None:
    found = verified(schedule, "unet", mode)
    assert found.ok, found


def verified(
    schedule: Schedule, name: str, mode: Any, *, layers: Any = None, **options: Any
) -> TrainingAgreement:
    inputs, targets = data(name)
    batches = [[(inputs.roll(step, 0), targets.roll(step, 0))] for step in range(5)]
    return verify(
        schedule,
        layers or MODELS[name](),
        nn.MSELoss(),
        batches,
        optimizer=sgd,
        recompute=mode,
        **{"transport": "strict-local", "clip_norm": 0.5, "costs": [1] * 8, **options},
    )


def test_dropout_before_and_after_a_skip_draws_as_in_one_process() -> None:
    layers = unet()
    layers[3:5] = [nn.Dropout(0.3), nn.Dropout(0.3)]
    for mode in MODES:
        found = verified(schemes.dapple(4, 4), "unet", mode, layers=layers)
        assert found.ok, found


def test_skips_without_a_barrier() -> None:
    table = cf.Skip("table", once=True)
    layers = encoder_decoder()
    layers[1], layers[7] = Table(table, "anew"), Masked(table)
    found = verified(
        schemes.chimera(4, 4), "encoder-decoder", "stage", layers=layers, clip_norm=None, barrier=False
    )
    assert found.ok, found


def test_skips_go_straight_to_who_takes_them() -> None:
    """By four stages of two layers: within stage 1 nothing, to the next stage with the output."""
    stages = stage_skips(unet(), (0, 2, 4, 6, 8))
    assert links_of(stages) == (SkipLink(0, 3),)
    assert [stage and stage.next for stage in stages] == [(), (2,), (), ()]
    assert stages[0] is not None
    assert stages[0].gives == ((SkipLink(0, 3), (0, 1)),)
    assert links_of(stage_skips(encoder_decoder(), (0, 2, 4, 6, 8))) == (SkipLink(1, 3),)
    assert links_of(stage_skips(encoder_decoder(), range(9))) == (
        SkipLink(0, 2),
        *(SkipLink(2, user) for user in range(4, 8)),
    )


def sent_between(name: str, schedule: Schedule, layers: list[nn.Module]) -> Counter[tuple[str, int]]:
    pipeline = Pipeline(layers, nn.MSELoss(), schedule, optimizer=sgd, costs=[1] * 8)
    sends = [task.action for tasks in pipeline._engine.runner.lists for task in tasks]
    return Counter(
        (str(send.skip), send.peer) for send in sends if isinstance(send, Send) and send.skip is not None
    )


def test_the_pipelines_own_lists_have_them() -> None:
    sent = run(sent_between, "unet", schemes.dapple(4, 4), unet(), workers=4)
    assert sent == [{("0 to 3", 3): 4}, {}, {}, {("0 to 3", 0): 4}]


# -- what is refused


class Late(nn.Module):
    """Loads before it saves."""

    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.save, self.load = skip.saver(), skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.load() + self.save(x)
        return result


class Seldom(nn.Module):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.save = skip.saver()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Checkpointed(nn.Module):
    """Calls a layer in a checkpoint of the user's own."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=F)


class Times(nn.Module):
    def __init__(self, skip: cf.Skip) -> None:
        super().__init__()
        self.linear, self.load = linear(), skip.loader()

    def forward(self, x: Tensor) -> Tensor:
        held = self.load()
        result: Tensor = self.linear(x) * held
        return result


def wrong() -> dict[str, tuple[list[nn.Module], str]]:
    """Layers, and the words with which they are refused."""
    a = cf.Skip("a")
    inner = Checkpointed(nn.Sequential(linear(), a.saver()), reentrant=True)
    return {
        "never saved": ([linear(), Times(a)], r"layer 1 \(Times\) loads the skip 'a', which no layer saves"),
        "never loaded": (
            [linear(), a.saver()],
            r"layer 1 \(SaveSkip\) saves the skip 'a', which no layer loads",
        ),
        "saved twice": (
            [nn.Sequential(linear(), a.saver()), linear(), a.saver(), Times(a)],
            r"layer 0 \(Sequential\) and layer 2 \(SaveSkip\) save the skip 'a'; make a Skip for each",
        ),
        "loaded before": (
            [linear(), Times(a), linear(), a.saver()],
            r"layer 1 \(Times\) loads the skip 'a', which layer 3 \(SaveSkip\) saves later",
        ),
        "loaded before in a layer": (
            [linear(), linear(), Late(a), linear()],
            "the skip 'a' is loaded before it was saved",
        ),
        "not saved": (
            [linear(), Seldom(a), linear(), Times(a)],
            "layer 1 did not save the skip 'a' in its forward",
        ),
        "changed by a later layer": (
            [linear(), a.saver(), nn.ELU(inplace=True), Times(a)],
            "changes in place what was saved in a skip before",
        ),
        "changed by its layer": (
            [nn.Sequential(linear(), a.saver(), nn.ELU(inplace=True)), linear(), linear(), Times(a)],
            "the skip 'a' was changed in place after it was saved",
        ),
        "loaded in a checkpoint": (
            [linear(), a.saver(), linear(), Checkpointed(Times(a), reentrant=False)],
            "the skip 'a' is loaded in a torch.utils.checkpoint, which would load it again",
        ),
        "saved in a reentrant checkpoint": (
            [linear(), inner, linear(), Times(a)],
            "the skip 'a' was saved without a graph and again in the backward",
        ),
    }


ON_READING = ["never saved", "never loaded", "saved twice"]


def one_step(layers: list[nn.Module], schedule: Schedule, mode: Any) -> float:
    pipeline = Pipeline(
        layers, nn.MSELoss(), schedule, optimizer=sgd, costs=[1] * len(layers), recompute=mode
    )
    inputs, targets = data("encoder-decoder")
    return pipeline.step(inputs, targets).loss


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("kind", wrong())
@pytest.mark.parametrize("mode", MODES)
def test_skips_that_cannot_be_right_are_refused(kind: str, mode: Any) -> None:
    layers, words = wrong()[kind]
    with pytest.raises(ConfigError, match=words):
        run(one_step, layers, schemes.dapple(2, 2), mode, workers=2)


@pytest.mark.parametrize("kind", sorted(wrong().keys() - {*ON_READING}))
def test_what_a_pipeline_refuses_goes_wrong_in_one_process_too(kind: str) -> None:
    layers, _ = wrong()[kind]
    with pytest.raises(ConfigError, match="the skip 'a'"):
        nn.Sequential(*layers)(torch.ones(2, 4, dtype=F)).sum().backward()


def test_a_skip_saved_in_a_checkpoint_with_a_graph_is_right() -> None:
    a = cf.Skip("a")
    inner = nn.Sequential(linear(), a.saver(), nn.Tanh())
    model = nn.Sequential(linear(), Checkpointed(inner, reentrant=False), linear(), Times(a))
    loss = nn.functional.mse_loss(model(data("encoder-decoder")[0]), data("encoder-decoder")[1])
    for mode in MODES:
        assert run(
            one_step, copy.deepcopy(list(model)), schemes.dapple(2, 2), mode, workers=2
        ) == pytest.approx([loss.item()] * 2)
    layers = list(model)
    found = [
        verified(schemes.dapple(2, 2), "encoder-decoder", mode, layers=layers, costs=None) for mode in MODES
    ]
    assert all(one.ok for one in found)


def test_a_copied_block_has_skips_of_its_own() -> None:
    """A block that saves and loads within itself, and its copy."""
    inner, outer = cf.Skip("inner"), cf.Skip("outer")
    block = nn.Sequential(inner.saver(), nn.Linear(4, 4, dtype=F), Times(inner))
    layers = [linear(), outer.saver(), block, copy.deepcopy(block), *copy.deepcopy(list(block)), Times(outer)]
    assert len(layers) == 8
    for schedule, mode in itertools.product((schemes.dapple(4, 4), schemes.hanayo(2, 4, waves=1)), MODES):
        found = verified(schedule, "encoder-decoder", mode, layers=layers)
        assert found.ok, found


# -- once a step


class Masked(nn.Module):
    """Masks the later places by a table that the first layer made."""

    def __init__(self, table: cf.Skip) -> None:
        super().__init__()
        self.linear, self.table = linear(), table.loader()

    def forward(self, x: Tensor) -> Tensor:
        table = self.table()
        result: Tensor = torch.tanh(self.linear(x)) * table["scale"] + table["shift"]
        return result


class Table(nn.Module):
    """Makes the same table for all micro-batches: anew, or as a buffer; or what is no such table."""

    scale: Tensor

    def __init__(self, table: cf.Skip, kind: str) -> None:
        super().__init__()
        self.table, self.kind, self.linear = table.saver(), kind, linear()
        self.register_buffer("scale", torch.arange(4, dtype=F).mul_(0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        if self.kind == "anew":
            scale = self.scale.clone()
        elif self.kind == "other":
            scale = x[0].detach()
        elif self.kind == "with a gradient":
            scale = self.linear(self.scale)
        self.table({"scale": scale, "shift": 0.25})
        result: Tensor = self.linear(x)
        return result


def tables(kind: str) -> list[nn.Module]:
    torch.manual_seed(3)
    table = cf.Skip("table", once=True)
    return [Table(table, kind), *(Masked(table) for _ in range(7))]


@pytest.mark.parametrize(
    "schedule",
    [
        schemes.interleaved(2, 4, chunks=2),
        schemes.chimera(4, 4, concat="forward-doubling"),
        schemes.chimera(4, 4, concat="backward-halving"),
        schemes.hanayo(2, 4, waves=1),
        schemes.pipedream_2bw(3, 4),
    ],
    ids=str,
)
def test_what_is_made_once_is_sent_once_a_step(schedule: Schedule) -> None:
    for kind, mode in (("buffer", "none"), ("anew", "stage"), ("buffer", "layer")):
        found = verified(schedule, "encoder-decoder", mode, layers=tables(kind))
        assert found.ok, found


def test_skips_between_processes() -> None:
    """Two workers of two stages each; what goes from stage 0 to 3 and back, for each micro-batch and once."""
    table = cf.Skip("table", once=True)
    layers = encoder_decoder()
    layers[1], layers[7] = Table(table, "buffer"), Masked(table)
    schedule = schemes.interleaved(2, 4, chunks=2)
    found = verified(schedule, "encoder-decoder", "layer", layers=layers, transport="gloo")
    assert found.ok, found


def few(layers: list[nn.Module], schedule: Schedule, sizes: list[int]) -> float:
    pipeline = Pipeline(layers, nn.MSELoss(), schedule, optimizer=sgd, costs=[1] * 8)
    rows = zip(*(part.split(sizes) for part in data("encoder-decoder")), strict=True)
    return pipeline.step(micro_batches=list(rows)).loss


def test_micro_batches_without_samples_make_nothing_once() -> None:
    """What is made once comes with the first micro-batch, which has to have samples if any later one has."""
    layers = tables("buffer")
    inputs, targets = data("encoder-decoder")
    expected = nn.functional.mse_loss(nn.Sequential(*layers)(inputs), targets).item()
    schedule = schemes.dapple(4, 4)
    assert run(few, layers, schedule, [4, 5, 0, 0], workers=4) == pytest.approx([expected] * 4)
    with pytest.raises(
        ConfigError, match="stage 0 makes a Skip with once=True with a micro-batch that has no"
    ):
        run(few, layers, schedule, [0, 4, 5, 0], workers=4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other", "something else for micro-batch 1 than for the first one of the step; leave out once=True"),
        ("with a gradient", "the skip 'table' has once=True and a gradient"),
    ],
)
def test_what_is_not_the_same_for_all_is_refused(kind: str, words: str) -> None:
    for mode in MODES:
        with pytest.raises(ConfigError, match=words):
            run(one_step, tables(kind), schemes.dapple(2, 2), mode, workers=2)
