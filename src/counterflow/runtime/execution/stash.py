"""What an op leaves for a later one of the same unit: a forward for its backward, that for its second half.

Invariant: nothing here is run; who puts it down and who takes it up are ``forwards.py`` and ``backwards.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..messages.values import Unit, Value
from ..stages.joints import Joints
from ..stages.randomness import SampleRows
from ..stages.recomputation import Contents, First
from ..stages.split_backward import SplitBackward
from .meters import Kept


class ForwardInput(NamedTuple):
    """Input of a forward for one unit.

    ``buffers`` are the input buffers to give back; ``by_skips`` counts the tensors with a gradient that were
    received by each skip connection.
    """

    unit: Unit
    tensors: list[Tensor]
    value: Value
    buffers: Sequence[Tensor]
    rows: SampleRows
    by_skips: Sequence[int] = ()


class Again(NamedTuple):
    """What a stage is computed again from.

    Attributes:
        value: its input.
        versions: of the input's tensors.
        buffers: what the stage's buffers held.
        marked: whether each output tensor was said to need a gradient.
        first: the output, if the second one is compared with it.
    """

    value: Value
    versions: list[int]
    buffers: Contents
    marked: list[bool]
    first: First | None = None


@dataclass(slots=True)
class Stash:
    """What a forward saves for the backward of one unit.

    Attributes:
        inputs: input tensors of the forward.
        outputs: its own, until ``edges`` are made of them.
        edges: where the backward begins; None until a recomputation has made the outputs with their graph.
        by_skips: how many inputs with a gradient came by each skip.
        reused: buffers to give back after the backward.
        done: those to give back as soon as there is time.
        loss: of the last stage, with whose gradient that of a state comes; None: of another stage.
        held: what is counted as saved for the backward.
        again: what that needs.
        joints: detach points in the graph of a split backward.
        left: what is counted as left to the next slice, until that has it among its inputs.
        graded: for each output that was said to need a gradient, whether it has one after a recomputation;
            None: all have.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    edges: Sequence[GradientEdge] | None
    reused: Sequence[Tensor]
    held: list[Kept]
    again: Again | None = None
    by_skips: Sequence[int] = ()
    joints: Joints | None = None
    done: Sequence[Tensor] = ()
    loss: Tensor | None = None
    left: list[Kept] = field(default_factory=list)
    graded: Sequence[bool] | None = None

    def release_outputs(self) -> None:
        """Keep of the outputs where the backward begins, and let them go."""
        self.edges = [get_gradient_edge(t) for t in self.outputs if t.requires_grad]
        self.outputs = []


class Waiting(NamedTuple):
    """What an input gradient leaves for the weights' gradients of its unit.

    Attributes:
        split: the backward, half done.
        held: what is counted as kept for it.
    """

    split: SplitBackward
    held: list[Kept]
