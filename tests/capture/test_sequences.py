"""Captured layers on slices of a sequence, and token after token: the numbers of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.runtime.stages.carrying import add_carries
from counterflow.schedule.registry import schedule_of
from counterflow.verification.training_agreement import verify

from .sequences import compare, in_slices, of_call

WORDS, WIDTH, LENGTH = 19, 16, 24


class Attention(nn.Module):
    """Causal attention, by the function's own flag or by the rows of a mask of pairs of positions."""

    def __init__(self, mask: str = "flag", heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.mask, self.heads, self.key_heads = mask, heads, key_heads
        sizes = [WIDTH, WIDTH * key_heads // heads, WIDTH * key_heads // heads]
        self.qkv, self.out = nn.Linear(WIDTH, sum(sizes)), nn.Linear(WIDTH, WIDTH)
        self.sizes = sizes
        if mask == "buffer":
            self.register_buffer("lower", torch.ones(LENGTH, LENGTH, dtype=torch.int64).tril())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = self.qkv(x).split(self.sizes, -1)
        query = query.view(samples, length, self.heads, -1).transpose(1, 2)
        key = key.view(samples, length, self.key_heads, -1).transpose(1, 2)
        value = value.view(samples, length, self.key_heads, -1).transpose(1, 2)
        if self.mask == "buffer":
            mask = self.lower[:length, :length] == 1  # type: ignore[index]
        y = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.mask == "flag", enable_gqa=True
        )
        return self.out(y.transpose(1, 2).reshape(samples, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(mask)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.before(x), mask)
        return x + self.inner(self.after(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder as users write it, without a Carry.

    Args:
        mask: how attention is made causal; ``window``: by a mask of four positions, with padding.
        table: positions from a table in place of an embedding.
        blocks: number of blocks; many are not looked into.
    """

    def __init__(self, mask: str = "flag", *, table: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.mask, self.words = mask, nn.Embedding(WORDS, WIDTH)
        self.places = None if table else nn.Embedding(LENGTH, WIDTH)
        self.table = nn.Parameter(torch.randn(1, LENGTH, WIDTH)) if table else None
        self.blocks = nn.ModuleList(Block(mask) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        numbers = torch.arange(length, device=ids.device)
        if self.places is not None:
            x = self.words(ids) + self.places(numbers)
        else:
            x = self.words(ids) + self.table[:, :length]  # type: ignore[index]
        mask = None
        if self.mask == "window":
            ahead = numbers[:, None] - numbers
            mask = ((ahead >= 0) & (ahead < 4))[None, None].expand(len(ids), 1, length, length)
            if attention_mask is not None:
                mask = mask & (attention_mask[:, None, None, :] == 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def decoder(*args: Any, **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(*args, **options).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.4)  # fresh ones give about the same logits everywhere
    return model


def ids(samples: int = 4, length: int = 13) -> Tensor:
    return torch.randint(WORDS, (samples, length), generator=torch.Generator().manual_seed(length))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(4, 13, dtype=torch.int64)
    for row in range(4):
        mask[row, 13 - 2 * row :] = 0
    return {"ids": ids(), "attention_mask": mask}


SEQ1F1B = "1f1b(stages=2, micro_batches=2, slices=3)"
MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "flag": ({}, ids),
    "table": ({"table": True}, ids),
    "buffer": ({"mask": "buffer"}, ids),
    "window": ({"mask": "window"}, ids),
    "padding": ({"mask": "window"}, padded),
    "deep": ({"blocks": 16}, ids),  # blocks, and the calls of attention in them, are not looked into
    "deep padding": ({"mask": "window", "blocks": 16}, padded),
}


@pytest.mark.parametrize("name", MODELS)
def test_slices_and_tokens_give_what_the_model_gives(name: str) -> None:
    """Outputs and gradients; one slice after the other, the last ones of one position."""
    options, inputs = MODELS[name]
    model = decoder(**options)
    layers = cf.layers(model, inputs())
    add_carries(layers)
    for lengths in ([5, 4, 4], [10, 1, 1, 1]):
        outputs = in_slices(layers, inputs(), lengths)
        compare(model, model(**of_call(inputs())), torch.cat(outputs, 1), tolerance=1e-10)


def test_stages_train_on_slices_as_one_process() -> None:
    for name, scheme, options in (
        ("flag", SEQ1F1B, {"recompute": "layer"}),
        ("padding", "zb-h1(stages=2, micro_batches=2, slices=2)", {"recompute": "stage"}),
    ):
        settings, inputs = MODELS[name]
        differences = verify(
            schedule_of(scheme, {}),
            cf.layers(decoder(**settings), inputs()),
            loss,
            [[(inputs(), ids().roll(-1, 1))]],
            optimizer=partial(torch.optim.SGD, lr=0.1),
            **options,  # type: ignore[arg-type]
        )
        assert differences.ok, (name, differences)


class Series(nn.Module):
    """Forecasts a series of features, of which some positions may count less."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block("flag") for _ in range(3))

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        y = self.enter(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y, None)
        y = self.head(y)
        return y if weights is None else y * weights[..., None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("weighed", [False, True])
def test_features_are_sliced_as_token_ids_are(weighed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 13, 5, dtype=torch.float64)
    inputs = {"x": x, "weights": torch.rand(4, 13, dtype=torch.float64)} if weighed else x
    differences = verify(
        schedule_of(SEQ1F1B, {}),
        cf.layers(Series().double(), inputs),
        nn.MSELoss(),
        [[(inputs, x.roll(-1, 1))]],
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    assert differences.ok, differences


class Convolves(nn.Module):
    """With channels where sequences have positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv1d(5, 5, 3, padding=1) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Steps(nn.Module):
    """With a forward that depends on the number of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.RNNCell(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            rows: list[Tensor] = []
            for row in x.unbind(1):
                rows.append(cell(row, rows[-1] if rows else None))
            x = torch.stack(rows, 1)
        return x


@pytest.mark.parametrize("make", [Convolves, Steps])
def test_a_dimension_that_has_to_stay_does_not_cost_layers(make: Callable[[], nn.Module]) -> None:
    example = torch.rand(4, 5, 5)
    layers = cf.layers(make(), example)
    assert len(layers) > 3
    with pytest.raises(cf.ConfigError, match=r"has \(any a, 5, 5\)"):
        layers[0](torch.rand(4, 4, 5))


class Flattens(nn.Module):
    """Rows of all positions between its modules, as in OPT: sizes go from layer to layer as numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            shape = x.shape
            x = first(x.reshape(-1, shape[-1])).tanh()
            x = second(x).view(shape)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("slices", ["2", "3"])
def test_sizes_that_are_passed_on_are_those_of_slices_and_of_the_sequence(length: int, slices: str) -> None:
    differences = verify(
        schedule_of(f"1f1b(stages=2, micro_batches=2, slices={slices})", {}),
        cf.layers(Flattens().double(), ids(4, length)),
        loss,
        [[(ids(4, length), ids(4, length).roll(-1, 1))]],
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    assert differences.ok, differences


def generated(model: nn.Module, example: Any, prompt: Tensor, tokens: int) -> Tensor:
    def work() -> Tensor:
        with cf.Pipeline(
            model, loss, "1f1b(stages=2, micro_batches=2)", optimizer=torch.optim.SGD, example=example
        ) as pipeline:
            pipeline.evaluate(example, ids())
            result = pipeline.generate(prompt, tokens=tokens)
            pipeline.evaluate(example, ids())
            return result

    results = cf.launch(work, workers=2, transport="local")
    assert torch.equal(*results)
    return results[0]


def test_tokens_are_those_of_whole_sequences() -> None:
    for name in ("table", "padding"):
        options, inputs = MODELS[name]
        model = decoder(**options)
        expected = prompt = ids(3, 6)
        with torch.no_grad():
            for _ in range(7):
                logits = model.eval()(expected)
                expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(generated(model.train(), inputs(), prompt, 7), expected), name


class Both(Decoder):
    """With attention to both sides."""

    def __init__(self) -> None:
        super().__init__("none")


class Eager(nn.Module):
    """With attention that no function of torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.more, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        scores = (self.more(x) @ x.transpose(1, 2)).masked_fill(mask, -torch.inf)
        return self.head(scores.softmax(-1) @ x)  # type: ignore[no-any-return]


class Sums(nn.Module):
    """With a sum over earlier positions, which only its numbers show."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.more, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.more(self.words(ids)).cumsum(1))  # type: ignore[no-any-return]


def sliced(model: nn.Module, example: Any) -> None:
    with cf.Pipeline(model, loss, SEQ1F1B, optimizer=torch.optim.SGD, example=example) as pipeline:
        pipeline.step(example, ids().roll(-1, 1))


@pytest.mark.parametrize(
    ("make", "example", "match"),
    [
        (
            Both,
            ids(),
            "'blocks.2.attention' has attention to both sides of a position; train whole sequences",
        ),
        (Eager, ids(), "the model takes a value for each pair of positions, but does not call torch's"),
        (Sums, ids(), r"layer 1 \(CapturedLayer\) of stage 0 makes something else of a whole sequence"),
        (Decoder, torch.rand(4, 13), "the example has no length of a sequence that may vary"),
    ],
)
def test_what_has_another_state_is_refused(make: Any, example: Tensor, match: str) -> None:
    torch.manual_seed(0)
    model = make()
    if example.is_floating_point():
        model.words = nn.Linear(13, WIDTH)
        model = nn.Sequential(model.words, nn.Linear(WIDTH, 4))
    with pytest.raises(cf.ConfigError, match=match):
        cf.launch(sliced, model, example, workers=2, transport="local")


def test_a_batch_of_tokens_alone_is_refused_where_the_example_has_more() -> None:
    class Typed(Decoder):
        def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward((ids + kinds) % WORDS)

    example = {"ids": ids(), "kinds": ids() % 2}
    with pytest.raises(cf.ConfigError, match=r"token ids alone, but the example .* has further tensors"):
        generated(Typed(), example, ids(3, 6), 2)
