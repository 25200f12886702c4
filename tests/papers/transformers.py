"""How the layers' costs in the planner's examples were found, each number with its source or its fit.

Measured by Chimera's authors: a BERT-large block (hidden 1024, 16 heads, 128 tokens, float32) on P100 and
V100. Everything else is scaled from it:

* seconds: as those of the measured block with as many tokens, times the ratio of floating-point operations.
  A device that is filled as far is as fast.
* saved bytes: 66·s·h + 9·heads·s² bytes a sample for a float32 block of s tokens (16 activations of 4 bytes
  and 2 masks of 1, a token and hidden number; 2 attention matrices of 4 bytes and a mask) makes 10.5 MiB of
  the measured block's 11.0; other blocks are that formula times 11.0/10.5.
* saved bytes of GPT-2 and of MixPipe's models: that formula times a factor, fitted on what their papers say
  fits a device.
* A100: the V100's seconds times 15.7/19.5, the ratio of their peak float32 rates.
* MixPipe's models: the seconds of the largest size as above; at B samples a device has B/(B + 6) of its
  highest rate, fitted on MixPipe's own ratios, because FLOPS(B) of its Figure 2 a has no numbers in the text.
* updates: Adam as PyTorch had it then reads or writes 20 numbers for each weight, at the memory's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from counterflow.papers.figures.figure_changes import half_rates
from counterflow.planning.inputs.layer_parts import Division
from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import LayerProfile, Profile
from counterflow.schedule.op import B, F

MIB = 2**20

_FLOAT = 4
"""Bytes of a number: all papers here train in float32."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a BERT or GPT, as far as its cost goes.

    Attributes:
        blocks: transformer blocks.
        hidden: h, the width.
        heads: attention heads.
        tokens: s, tokens of a sample in the paper's runs.
        vocabulary: different tokens.
        positions: rows of the table of positions.
        bert: whether the head has a transformation, a pooler and biases, the embedding segments and a norm.
        saved_factor: what the formula of saved bytes is multiplied by; 1 unless a paper says what fits.
        saved_source: what that factor was fitted on.
        half_rate_samples: samples of a micro-batch at which a device has half of its highest rate; 0: as the
            measured block has it.
    """

    blocks: int
    hidden: int
    heads: int
    tokens: int
    vocabulary: int
    positions: int
    bert: bool
    saved_factor: float = 1.0
    saved_source: str = ""
    half_rate_samples: float = 0.0

    @property
    def block_weights(self) -> int:
        """Parameters of a block: 12h² + 13h."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_weights(self) -> int:
        """Parameters of the embedding."""
        rows = self.vocabulary + self.positions + (2 if self.bert else 0)
        return rows * self.hidden + (2 * self.hidden if self.bert else 0)

    @property
    def head_weights(self) -> int:
        """Parameters of the head."""
        h = self.hidden
        plain = self.vocabulary * h + 2 * h
        return plain + (self.vocabulary + 2 * (h * h + h) + 2 * h + 2 if self.bert else 0)

    @property
    def block_operations(self) -> float:
        """Floating-point operations of a block's forward on one sample: 24sh² + 4s²h."""
        s, h = self.tokens, self.hidden
        return 24.0 * s * h * h + 4.0 * s * s * h

    @property
    def head_operations(self) -> float:
        """Of the head's forward on one sample: 2shV, and 2sh² for BERT's transformation."""
        s, h = self.tokens, self.hidden
        return 2.0 * s * h * self.vocabulary + (2.0 * s * h * h if self.bert else 0.0)

    @property
    def block_saved_bytes(self) -> float:
        """What a block keeps of one sample; see the head of this file."""
        s, h = self.tokens, self.hidden
        formula = 66.0 * s * h + 9.0 * self.heads * s * s
        return formula * _SAVED_MEASURED / _SAVED_BY_FORMULA * self.saved_factor

    @property
    def output_bytes(self) -> float:
        """What a block gives, of one sample."""
        return float(_FLOAT * self.tokens * self.hidden)


BERT_LARGE_BLOCK = Transformer(1, 1024, 16, 128, 30522, 512, bert=True)
"""The block that Chimera's authors measured."""

_SAVED_MEASURED = 11.0 * MIB
_SAVED_BY_FORMULA = 66.0 * 128 * 1024 + 9.0 * 16 * 128 * 128

_SAMPLES = (1, 2, 4, 8, 16, 32, 64)
_P100 = (
    (1.16, 1.51, 2.52, 4.50, 9.30, 16.10, 31.07),
    (1.67, 2.56, 4.20, 7.65, 14.88, 26.95, 52.88),
)
_V100 = (
    (1.31, 1.58, 1.90, 2.90, 5.44, 10.39, 19.98),
    (1.24, 1.56, 2.60, 4.55, 8.60, 16.28, 32.29),
)
"""Milliseconds of the measured block's forward and backward at each of ``_SAMPLES``."""

_MEASURED = "measured by Chimera's authors, public with their code: BERT-large block, 128 tokens, float32"


UPDATE_PASSES = {"Adam": 20, "SGD": 3}
"""Numbers of a weight's size that an optimiser without fused kernels reads and writes."""


def update_seconds(optimizer: str, memory_rate: float) -> tuple[float, str]:
    """Seconds of an update for each byte of weights, and their source."""
    passes = UPDATE_PASSES[optimizer]
    counted = f"counted: {optimizer} without fused kernels moves {passes} numbers a weight"
    return passes / memory_rate, f"{counted}, at {memory_rate / 1e9:g} GB/s"


_DIVIDED = (
    "Shoeybi et al. 2019, section 3: two all-reduces each way, all but norms and two biases divided; of "
    "saved bytes all but 18sh (Korthikanti et al. 2022, equation 2); taken: seconds are of matrix products"
)


def _division(shape: Transformer) -> Division:
    """Of a block: the heads of its attention, the columns and then the rows of its feed-forward."""
    h, s = shape.hidden, shape.tokens
    attention = 9 * shape.heads * s
    saved = (48 * h + attention) / (66 * h + attention)
    weights = (12 * h + 7) / (12 * h + 13)
    return Division(*(weights, 1.0, 1.0, saved), forward_sums=2, backward_sums=2, parts=shape.heads)


@dataclass(frozen=True, slots=True)
class _Device:
    """A measured device, or one whose seconds are those of a measured one times ``factor``.

    ``memory_rate`` is in bytes per second.
    """

    machine: str
    milliseconds: tuple[tuple[float, ...], tuple[float, ...]]
    date: str
    memory_rate: float
    factor: float = 1.0
    fit: str = ""

    def block(self) -> LayerProfile:
        """The block as it was measured."""
        forward, backward = (tuple(value / 1000 * self.factor for value in row) for row in self.milliseconds)
        return LayerProfile(
            samples=tuple(map(float, _SAMPLES)),
            forward_seconds=forward,
            backward_seconds=backward,
            saved_bytes=tuple(_SAVED_MEASURED * n for n in _SAMPLES),
            weights_bytes=48.6 * MIB,
            output_bytes=BERT_LARGE_BLOCK.output_bytes,
            tensor_parallel=_division(BERT_LARGE_BLOCK),
            sources={
                "samples": _MEASURED,
                "forward_seconds": self.fit or _MEASURED,
                "backward_seconds": self.fit or _MEASURED,
                "saved_bytes": f"{_MEASURED}: 11.0 MiB a sample",
                "weights_bytes": f"{_MEASURED}; its 12h² + 13h parameters are 48.05 MiB",
                "output_bytes": "4 bytes · 128 tokens · 1024",
                "tensor_parallel": _DIVIDED,
            },
        )


_DEVICES = {
    "p100": _Device("NVIDIA P100 16 GB", _P100, "Chimera, SC'21", 732e9),
    "v100": _Device("NVIDIA V100", _V100, "Chimera, SC'21", 900e9),
    "a100": _Device(
        "NVIDIA A100",
        _V100,
        "Chimera, SC'21, scaled",
        1555e9,
        factor=15.7 / 19.5,
        fit="the V100's times 15.7/19.5, the ratio of their peak float32 rates in TFLOP/s",
    ),
}


def profile_of(device: str, shape: Transformer, optimizer: str = "Adam") -> Profile:
    """What a transformer's layers cost on a paper's device.

    Args:
        device: ``p100``, ``v100`` or ``a100``.
        shape: the transformer.
        optimizer: ``Adam`` or ``SGD``, for the time of an update.

    >>> bert = profile_of("p100", BERT_48)
    >>> bert.layer("block").seconds(F, 8), bert.layer("block").weights_bytes / MIB
    (0.0045, 48.6)
    """
    measured = _DEVICES[device]
    block = measured.block()
    same = (shape.hidden, shape.heads, shape.tokens) == (1024, 16, 128)
    layers = {
        "embedding": _embedding(shape),
        "block": block if same else _scaled_block(block, shape),
        "head": _head(block, shape),
    }
    update, source = update_seconds(optimizer, measured.memory_rate)
    return Profile(
        name=f"{device}-{shape.hidden}-{shape.tokens}",
        machine=measured.machine,
        date=measured.date,
        layers=layers,
        update_seconds_per_byte=update,
        sources={"update_seconds_per_byte": source},
    )


def _sizes(shape: Transformer) -> tuple[float, ...]:
    """Powers of two of samples with at most the 8,192 tokens that were measured, and one sample anyway."""
    most = max(1, _SAMPLES[-1] * BERT_LARGE_BLOCK.tokens // shape.tokens)
    return tuple(float(2**i) for i in range(most.bit_length()))


def _scaled(
    curve: Callable[[float], float], shape: Transformer, sizes: tuple[float, ...], operations: float
) -> tuple[float, ...]:
    """Seconds at each size: the measured block's with as many tokens, times the ratio of operations."""
    ratio = shape.tokens / BERT_LARGE_BLOCK.tokens
    each = operations / (BERT_LARGE_BLOCK.block_operations * ratio)
    seconds = tuple(curve(n * ratio) * each for n in sizes)
    if not shape.half_rate_samples:
        return seconds
    rates = half_rates(sizes, seconds, shape.half_rate_samples)
    return tuple(rate * value for rate, value in zip(rates, seconds, strict=True))


def _fit(shape: Transformer, operations: str) -> str:
    text = f"those of the measured block with as many tokens, times the ratio of {operations}"
    if not shape.half_rate_samples:
        return text
    return (
        f"{text}, at the largest size; B samples at B/(B + {shape.half_rate_samples:g}) of the highest rate: "
        "fit on MixPipe's Figure 8, GPipe and DAPPLE"
    )


def _scaled_block(block: LayerProfile, shape: Transformer) -> LayerProfile:
    sizes, lines = _sizes(shape), block.lines()
    fit = _fit(shape, "24sh² + 4s²h operations")
    return LayerProfile(
        samples=sizes,
        forward_seconds=_scaled(lines[F].at, shape, sizes, shape.block_operations),
        backward_seconds=_scaled(lines[B].at, shape, sizes, shape.block_operations),
        saved_bytes=tuple(shape.block_saved_bytes * n for n in sizes),
        weights_bytes=float(_FLOAT * shape.block_weights),
        output_bytes=shape.output_bytes,
        tensor_parallel=_division(shape),
        sources={
            "forward_seconds": fit,
            "backward_seconds": fit,
            "saved_bytes": "66sh + 9·heads·s² bytes times 11.0/10.5, at which the measured block comes out"
            + (f", times {shape.saved_factor:g}; {shape.saved_source}" if shape.saved_source else ""),
            "weights_bytes": "4 bytes · (12h² + 13h)",
            "output_bytes": "4 bytes · s · h",
            "tensor_parallel": _DIVIDED,
        },
    )


def _embedding(shape: Transformer) -> LayerProfile:
    """Lookups and an addition move bytes and compute nothing: their time is left out."""
    return LayerProfile(
        samples=(1.0,),
        forward_seconds=(0.0,),
        backward_seconds=(0.0,),
        saved_bytes=(shape.output_bytes * (2.25 if shape.bert else 0.25),),
        weights_bytes=float(_FLOAT * shape.embedding_weights),
        output_bytes=shape.output_bytes,
        sources={
            "forward_seconds": "taken as 0: lookups, small beside a block",
            "backward_seconds": "taken as 0: as the forward",
            "saved_bytes": "dropout's mask, and what BERT's norm keeps: counted, not measured",
            "weights_bytes": "4 bytes · parameters",
            "output_bytes": "4 bytes · s · h",
        },
    )


def _head(block: LayerProfile, shape: Transformer) -> LayerProfile:
    sizes, lines = _sizes(shape), block.lines()
    fit = _fit(shape, "operations (2shV and 2sh²)")
    logits = float(_FLOAT * shape.tokens * shape.vocabulary)
    # The loss keeps the logits' log-softmax; the layers before them keep an input or two each.
    saved = logits + shape.output_bytes * (4 if shape.bert else 2)
    return LayerProfile(
        samples=sizes,
        forward_seconds=_scaled(lines[F].at, shape, sizes, shape.head_operations),
        backward_seconds=_scaled(lines[B].at, shape, sizes, shape.head_operations),
        saved_bytes=tuple(saved * n for n in sizes),
        weights_bytes=float(_FLOAT * shape.head_weights),
        output_bytes=logits,
        sources={
            "forward_seconds": fit,
            "backward_seconds": fit,
            "saved_bytes": "the log-softmax of the logits and the layers' inputs: counted, not measured",
            "weights_bytes": "4 bytes · parameters",
            "output_bytes": "4 bytes · s · vocabulary",
        },
    )


_MIXPIPE_SAVED = (
    "fit: with B=16 MixPipe (BERT-48, D=4, K=2) fits and Chimera (K=4) needs recomputation (MixPipe, section "
    "IV-C); one float matrix of attention less would be 0.77"
)
_GPT_2_SAVED = (
    "fit: of all but GEMS only Chimera fits without recomputation, at D=32 (Chimera, section 4.2.3)"
)

BERT_48 = Transformer(48, 1024, 16, 128, 30522, 512, bert=True)
BERT_48_MIXPIPE = Transformer(48, 1024, 16, 512, 30592, 512, True, 0.8, _MIXPIPE_SAVED, 6.0)
GPT_128 = Transformer(128, 1024, 16, 512, 50257, 1024, bert=False)
BERT_64 = Transformer(64, 2560, 64, 512, 30522, 512, bert=True)
BERT_192 = Transformer(192, 768, 12, 128, 30522, 512, bert=True)
BERT_768 = Transformer(768, 768, 12, 128, 30522, 512, bert=True)
GPT_2 = Transformer(64, 1280, 20, 632, 50257, 1024, False, 1.145, _GPT_2_SAVED)
GPT_72 = Transformer(72, 1024, 16, 512, 50304, 512, False, 0.8, _MIXPIPE_SAVED, 6.0)


def model_of(name: str, shape: Transformer, optimizer_states: float, source: str) -> Model:
    """A transformer as a list of layers: embedding, blocks, head."""
    return Model(
        name=name,
        layers=("embedding", *["block"] * shape.blocks, "head"),
        optimizer_states=optimizer_states,
        input_bytes=8.0 * shape.tokens * (2 if shape.bert else 1),
        train={"kind": name, "positions": shape.tokens},
        source=source,
    )
