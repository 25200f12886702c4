"""Every model: its list of layers, shapes, gradients, initialisation on any device, tied parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from counterflow.capture.model_layers import Activation, parameter_count
from counterflow.errors import ConfigError
from counterflow.models import (
    BERTConfig,
    GPTConfig,
    ModelConfig,
    Norm,
    ResNeXtConfig,
)

GPT = GPTConfig(layers=3, hidden=16, heads=2, vocabulary=20, positions=8, dropout=0.0)
BERT = BERTConfig(layers=2, hidden=16, heads=2, vocabulary=20, positions=8, dropout=0.0)
DIGITS = ResNeXtConfig((1, 2), groups=4, width=2, classes=10, channels=1, planes=8, small_images=True)

MODELS: dict[str, ModelConfig] = {
    "gpt": GPT,
    "gpt tied, with bias": dataclasses.replace(GPT, tied=True, output_bias=True),
    "gpt with experts": dataclasses.replace(GPT, experts=4),
    "bert": BERT,
    "bert tied": dataclasses.replace(BERT, tied=True),
    "bert without next sentence": dataclasses.replace(BERT, next_sentence=False),
    "digits": DIGITS,
    "digits, groups normalised": dataclasses.replace(DIGITS, norm=Norm.GROUP),
    "photographs": ResNeXtConfig((1, 1), groups=2, width=2, classes=5, planes=4),
}

every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def shared_parameters(layers: list[nn.Module]) -> list[tuple[tuple[int, str], ...]]:
    """Parameters that several layers hold: for each, the layers' indices and its names there."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            holders.setdefault(id(parameter), []).append((index, name))
    return [tuple(places) for places in holders.values() if len(places) > 1]


def run(layers: list[nn.Module], value: Activation) -> Activation:
    for layer in layers:
        value = layer(value)
    return value


def sample_of(config: ModelConfig, samples: int = 3) -> tuple[Activation, Activation]:
    generator = torch.Generator().manual_seed(5)
    if isinstance(config, ResNeXtConfig):
        return config.sample(samples, 8 if config.small_images else 32, generator=generator)
    return config.sample(samples, generator=generator)


def loss_of(config: ModelConfig, layers: list[nn.Module], inputs: Activation, target: Activation) -> Tensor:
    loss: Tensor = config.loss(run(layers, inputs), target)  # type: ignore[arg-type]
    return loss


def shapes(value: Activation) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in (value if isinstance(value, tuple) else (value,))]


@every_model
def test_a_list_of_layers_without_nested_sequentials(config: ModelConfig) -> None:
    layers = config.build()
    blocks = sum(config.blocks) if isinstance(config, ResNeXtConfig) else config.layers
    name = type(config).__name__.removesuffix("Config").replace("NeX", "nex") + "Block"
    assert [type(layer).__name__ for layer in layers][1:-1] == [name] * blocks
    assert not any(isinstance(module, nn.Sequential) for layer in layers for module in layer.modules())


def test_gpt_shapes() -> None:
    embedding, *blocks, head = GPT.build()
    tokens, target = GPT.sample(3, positions=5)
    assert tokens.dtype == target.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    hidden = embedding(tokens)
    assert shapes(hidden) == [(3, 5, 16)]
    assert shapes(run(blocks, hidden)) == [(3, 5, 16)]
    assert shapes(head(hidden)) == [(3, 5, 20)]


def test_gpt_sees_only_what_came_before() -> None:
    layers = GPT.build()
    tokens, _ = GPT.sample(1)
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % GPT.vocabulary
    before, after = run(layers, tokens), run(layers, changed)
    assert isinstance(before, Tensor)
    assert isinstance(after, Tensor)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_bert_shapes() -> None:
    embedding, *blocks, head = BERT.build()
    (tokens, segments), target = BERT.sample(3)
    hidden = embedding((tokens, segments))
    assert shapes(hidden) == [(3, 8, 16)]
    assert shapes(run(blocks, hidden)) == [(3, 8, 16)]
    assert shapes(head(hidden)) == [(3, 8, 20), (3, 2)]
    assert shapes(target) == [(3, 8), (3,)]


def test_berts_mask_travels_and_hides() -> None:
    layers = BERT.build()
    (tokens, segments), _ = BERT.sample(2)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    assert shapes(run(layers[:-1], (tokens, segments, mask))) == [(2, 8, 16), (2, 8)]
    changed = tokens.clone()
    changed[1, 7] = (tokens[1, 7] + 1) % BERT.vocabulary
    before = run(layers, (tokens, segments, mask))
    after = run(layers, (changed, segments, mask))
    torch.testing.assert_close(before[0][:, :6], after[0][:, :6])
    nothing_hidden = run(layers, (tokens, segments, torch.ones_like(mask)))
    torch.testing.assert_close(nothing_hidden, run(layers, (tokens, segments)))
    assert not torch.allclose(nothing_hidden[0][1], before[0][1])


def test_resnext_shapes() -> None:
    small, _ = DIGITS.sample(2, 8)
    assert [tuple((small := layer(small)).shape) for layer in DIGITS.build()] == [
        (2, 8, 8, 8),
        (2, 32, 8, 8),
        (2, 64, 4, 4),
        (2, 64, 4, 4),
        (2, 10),
    ]
    large, _ = ResNeXtConfig((1, 1)).sample(1, device="meta")
    with torch.device("meta"):
        layers = ResNeXtConfig((1, 1)).build()
    assert [tuple((large := layer(large)).shape) for layer in layers] == [
        (1, 64, 56, 56),
        (1, 256, 56, 56),
        (1, 512, 28, 28),
        (1, 1000),
    ]


@every_model
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    torch.manual_seed(0)
    layers = config.build()
    loss = loss_of(config, layers, *sample_of(config))
    assert loss.dim() == 0
    loss.backward()
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, f"{name} of layer {index}"
            assert parameter.grad.abs().sum() > 0, f"{name} of layer {index}"


@every_model
def test_made_on_meta_and_reset_is_what_the_seed_builds(config: ModelConfig) -> None:
    torch.manual_seed(3)
    direct = config.build()

    with torch.device("meta"):
        layers = config.build()
    assert all(tensor.is_meta for layer in layers for tensor in layer.state_dict().values())
    shared = shared_parameters(layers)
    for layer in layers:
        layer.to_empty(device="cpu")
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else 77)
    for (first, first_name), *further in shared:
        for further_tensor, name in further:
            owner, _, own_name = name.rpartition(".")
            tied = layers[first].get_parameter(first_name)
            setattr(layers[further_tensor].get_submodule(owner), own_name, tied)
    torch.manual_seed(3)
    for layer in layers:
        for module in layer.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    for index, (built, seeded) in enumerate(zip(layers, direct, strict=True)):
        assert built.state_dict().keys() == seeded.state_dict().keys()
        for name, tensor in built.state_dict().items():
            assert torch.equal(tensor, seeded.state_dict()[name]), f"{name} of layer {index}"
        assert {name for name, _ in built.named_buffers()} <= built.state_dict().keys()


@pytest.mark.parametrize(
    ("config", "head"), [(GPT, "output.weight"), (BERT, "decoder.weight")], ids=["gpt", "bert"]
)
def test_a_tied_output_is_the_embeddings_own_parameter(config: GPTConfig | BERTConfig, head: str) -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = dataclasses.replace(config, tied=True).build()
        assert layers[0].get_parameter("tokens.weight") is layers[-1].get_parameter(head)
        assert shared_parameters(layers) == [((0, "tokens.weight"), (len(layers) - 1, head))]
    assert shared_parameters(config.build()) == []
    untied = parameter_count(config.build())
    assert untied - parameter_count(layers) == config.vocabulary * config.hidden


def test_fresh_weights_have_their_deviation() -> None:
    torch.manual_seed(0)
    config = GPTConfig(layers=8, hidden=128, heads=4, vocabulary=300, positions=64, deviation=0.05)
    embedding, block, *_, head = config.build()
    for layer, name, deviation in [
        (embedding, "tokens.weight", 0.05),
        (block, "attention.projection.weight", 0.05),
        (block, "attention.output.weight", 0.05 / 4),
        (block, "feed_forward.contract.weight", 0.05 / 4),
        (head, "output.weight", 0.05),
    ]:
        assert layer.get_parameter(name).std().item() == pytest.approx(deviation, rel=0.05)
    assert block.get_parameter("feed_forward.expand.bias").abs().max() == 0


def test_dropout_drops_in_training_only() -> None:
    torch.manual_seed(0)
    layers = dataclasses.replace(GPT, dropout=0.5).build()
    tokens, _ = GPT.sample(2)
    first, second = run(layers, tokens), run(layers, tokens)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.allclose(first, second)
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(run(layers, tokens), run(layers, tokens), rtol=0, atol=0)


@pytest.mark.parametrize("norm", Norm)
def test_only_batch_normalisation_mixes_samples(norm: Norm) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(DIGITS, norm=norm)
    layers = config.build()
    images, _ = config.sample(4, 8)
    together = run(layers, images)
    assert isinstance(together, Tensor)
    first, second = (run(layers, half) for half in images.split(2))
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    separate = torch.cat([first, second])
    assert torch.allclose(together, separate, atol=1e-5) is (norm is Norm.GROUP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "hidden=16 with heads=3: the heads must divide"),
        ({"layers": 0}, "layers=0: must be 1 or more"),
        ({"vocabulary": 0}, "vocabulary=0: must be 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0: must be 0 or more and below 1"),
        ({"deviation": 0.0}, "deviation=0.0: must be above 0"),
    ],
)
def test_gpts_that_cannot_be(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(GPT, **change)  # type: ignore[arg-type]


def test_other_models_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="segments=0: must be 1 or more"):
        dataclasses.replace(BERT, segments=0)
    with pytest.raises(ConfigError, match="the blocks of at least one group"):
        dataclasses.replace(DIGITS, blocks=())
    with pytest.raises(ConfigError, match="blocks=0: must be 1 or more"):
        dataclasses.replace(DIGITS, blocks=(2, 0))


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="samples of 9 tokens for a model of 8 positions"):
        run(GPT.build(), torch.zeros(1, 9, dtype=torch.int64))
    embedding = BERT.build()[0]
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ConfigError, match="samples of 9 tokens for a model of 8 positions"):
        embedding((tokens, tokens))
    with pytest.raises(ConfigError, match=r"BERT's input is Tensor: give \(token ids, segment ids\)"):
        embedding(tokens)
    with pytest.raises(ConfigError, match="BERT's input is a tuple of 1"):
        embedding((tokens,))
