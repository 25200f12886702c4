"""How the layers' costs in WPipe's ResNeXt examples were found, each number with its source.

Measured by NVIDIA (DeepLearningExamples, PyTorch, ResNeXt101-32x4d, float32, one V100 of 16 GB, images of 224
pixels): milliseconds of a forward at 1 to 64 images, and 150.05 images per second in training with 64. All
bottleneck blocks have almost equal operations, so a layer's seconds are the network's by its operations.
Saved bytes are counted: the inputs of convolutions, of batch normalisation and of ReLU in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import LayerProfile, Profile

from .transformers import update_seconds

SAMPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
FORWARD = (21.02e-3, 22.14e-3, 22.57e-3, 24.35e-3, 40.04e-3, 73.71e-3, 131.04e-3)
"""Seconds of ResNeXt-101's forward at each of ``SAMPLES``."""

TRAINING = 64 / 150.05
"""Seconds of its forward and backward at 64 images."""

_MEASURED = "ResNeXt101-32x4d on a V100 in float32, measured by NVIDIA (DeepLearningExamples), by operations"
_BACKWARD = "the forward's times (64/150.05 s - 0.131 s) / 0.131 s, by the same measurement of training"
_COUNTED = "counted: inputs of convolutions, of batch norms and of ReLUs in place, float32"

BLOCKS = {
    "resnext-101": (3, 4, 23, 3),
    "resnext-200": (3, 24, 36, 3),
    "resnext-302": (3, 38, 56, 3),
    "resnext-500": (3, 64, 96, 3),
    "resnext-800": (3, 104, 156, 3),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a layer for one image of 224 pixels.

    Attributes:
        operations: multiplications of its convolutions and matrices.
        saved: numbers saved for the backward, with the input.
        weights: parameters.
        output: numbers of the output.
    """

    operations: float
    saved: float
    weights: float
    output: float


def kinds(blocks: tuple[int, ...]) -> tuple[str, ...]:
    """Kinds of the layers; the first block of a group widens, and halves the resolution but in the first."""
    inner = [
        kind
        for group, count in enumerate(blocks, 1)
        for kind in (f"enter{group}", *[f"block{group}"] * (count - 1))
    ]
    return ("stem", *inner, "head")


def counts() -> dict[str, Counts]:
    """Counts of every kind of layer of a 32×4d ResNeXt."""
    stem = Counts(112 * 112 * 64 * 147, 3 * 224**2 + 2 * 64 * 112**2 + 64 * 56**2, 64 * 147 + 128, 64 * 56**2)
    head = Counts(2048 * 1000, 2048 * 49 + 2048 + 2000, 2048 * 1000 + 1000, 1000)
    table = {"stem": stem, "head": head}
    for group in range(4):
        side, width, outputs = 56 // 2**group, 128 * 2**group, 256 * 2**group
        pixels = side * side
        for kind, inputs in (
            (f"enter{group + 1}", 64 if group == 0 else outputs // 2),
            (f"block{group + 1}", outputs),
        ):
            entry = kind.startswith("enter")
            before = pixels * (4 if entry and group > 0 else 1)
            grouped, shortcut = width * width // 32 * 9, inputs * outputs if entry else 0
            table[kind] = Counts(
                before * inputs * width + pixels * (grouped + width * outputs + shortcut),
                before * (inputs + 2 * width) + pixels * (2 * width + outputs * (3 if entry else 2)),
                inputs * width
                + grouped
                + width * outputs
                + shortcut
                + 4 * width
                + (4 if entry else 2) * outputs,
                pixels * outputs,
            )
    return table


def profile() -> Profile:
    """What the layers of a ResNeXt cost on a V100."""
    table = counts()
    whole = sum(table[kind].operations for kind in kinds(BLOCKS["resnext-101"]))
    backward = TRAINING / FORWARD[-1] - 1

    def layer(each: Counts) -> LayerProfile:
        share = each.operations / whole
        return LayerProfile(
            samples=SAMPLES,
            forward_seconds=tuple(share * seconds for seconds in FORWARD),
            backward_seconds=tuple(share * backward * seconds for seconds in FORWARD),
            saved_bytes=tuple(4.0 * each.saved * n for n in SAMPLES),
            weights_bytes=4.0 * each.weights,
            output_bytes=4.0 * each.output,
            sources={
                "forward_seconds": _MEASURED,
                "backward_seconds": _BACKWARD,
                "saved_bytes": _COUNTED,
                "weights_bytes": "4 bytes · parameters",
                "output_bytes": "4 bytes · numbers of the output",
            },
        )

    update, source = update_seconds("SGD", 900e9)
    return Profile(
        name="v100-resnext-224",
        machine="NVIDIA V100",
        date="NVIDIA DeepLearningExamples, 2020",
        layers={kind: layer(each) for kind, each in table.items()},
        update_seconds_per_byte=update,
        sources={"update_seconds_per_byte": source},
    )


def model(name: str) -> Model:
    """A ResNeXt of WPipe as a list of layers; it trains with SGD and momentum."""
    return Model(
        name=name,
        layers=kinds(BLOCKS[name]),
        optimizer_states=1.0,
        input_bytes=4.0 * 3 * 224**2,
        source="WPipe, appendix A.2; images of 224 pixels and SGD with momentum taken",
    )
