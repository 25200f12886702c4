"""Steps of one layer in one mode: what it accepts, calls, returns and frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .example_call import Example
from .placeholders import Member, OfDtype, Ref, Size, Template
from .record import AttentionCall, RecordedCall


@dataclass(frozen=True, slots=True)
class Sizes:
    """Origins of a layer's free sizes.

    Attributes:
        sources: by group, an input tensor and the dimension with this size.
        numbers: sizes that are passed as numbers, after the tensors.
    """

    sources: Mapping[int, tuple[Ref, int]]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedInput:
    """Input of a first layer, and the example for which the model was captured.

    Attributes:
        example: the example.
        inputs: by leaf that is a tensor, its reference.
    """

    example: Example
    inputs: Mapping[int, Ref]


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """A layer's steps in one mode.

    Attributes:
        takes: input tensors; none for a first layer.
        sizes: free sizes.
        steps: steps of the layer.
        frees: by step, tensors that no later step takes.
        gives: output tensors, then numbers; None: ``output``.
        output: output of the last layer.
        dtype_of: source of the weights' dtype: the name of a parameter, or an input tensor.
        entry: input of a first layer.
        used: names of the keyword arguments from which the model's output is computed.
        sequence: steps on slices of a sequence; a text says why there are none.
    """

    takes: tuple[Ref, ...]
    sizes: Sizes
    steps: tuple[RecordedCall, ...]
    frees: tuple[tuple[Ref, ...], ...]
    gives: tuple[Ref, ...]
    numbers: tuple[int, ...]
    output: Template | None
    dtype_of: str | Ref | None
    entry: CapturedInput | None
    used: frozenset[str]
    sequence: SequenceSteps | str = ""

    def __deepcopy__(self, memo: object) -> LayerSteps:
        """Itself: it is immutable, and copies of a layer share it."""
        return self


@dataclass(frozen=True, slots=True)
class SequenceSteps:
    """A layer's steps on slices of a sequence.

    Attributes:
        part: steps of which each runs on the slice.
        length: group of the number of positions.
        context: steps that run on the whole sequence so far, and make context tensors.
        inputs: inputs of the model that these take, which the layer saves for later slices.
        dims: by context tensor, the dimensions of the positions.
        attentions: by step of ``part``, its calls of attention, which carry keys and values.
    """

    part: LayerSteps
    length: int
    context: tuple[RecordedCall, ...]
    inputs: tuple[Ref, ...]
    dims: Mapping[Ref, tuple[int, ...]]
    attentions: tuple[tuple[AttentionCall, ...], ...]

    @property
    def states(self) -> int:
        """Number of states that the layer carries: positions, and those of each call of attention."""
        return 1 + sum(map(len, self.attentions))


def held_names(part: LayerSteps) -> list[str]:
    """Names of the parameters, buffers and constants that a part's steps take."""
    templates = [step.takes for step in part.steps] + ([] if part.output is None else [part.output])
    return list(dict.fromkeys(x.name for t in templates for x in t.leaves() if isinstance(x, Member)))


def needs_dtype(steps: Sequence[RecordedCall], output: Template | None) -> bool:
    """Check whether some steps use the dtype of the weights."""
    templates = [step.takes for step in steps] + ([] if output is None else [output])
    return any(isinstance(leaf, OfDtype) for template in templates for leaf in template.leaves())


def groups_in(steps: Sequence[RecordedCall], output: Template | None) -> set[int]:
    """Groups of free sizes that some steps use."""
    templates = [step.takes for step in steps] + ([] if output is None else [output])
    leaves = (leaf for template in templates for leaf in template.leaves() if isinstance(leaf, Size))
    return {group for leaf in leaves for group in leaf.groups}
