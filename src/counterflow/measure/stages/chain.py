"""The stages of a pipeline, run one after another, so each worker has inputs on which to measure its own.

Invariant: inputs have the shapes and types that a step gives them; their values do not affect costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.api.skip import Carried
from counterflow.planning.inputs.model import LayerSkip
from counterflow.runtime.messages.values import Structure, flatten_value, unflatten_value
from counterflow.runtime.mini_batch.samples import cut, moved
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.passes import Output, RawHead
from counterflow.runtime.stages.sample_rows import SampleRows
from counterflow.runtime.stages.saved_bytes import LayerSavedBytes
from counterflow.runtime.stages.stage import LocalStage
from counterflow.schedule.ir import SkipLink

_Described = tuple[Structure | None, list[tuple[torch.Size, torch.dtype, bool]]]
"""Structure of a value, and shape, type and need of a gradient of each of its tensors."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Inputs, target and outputs of this worker's stages for a share of the sequence.

    Attributes:
        share: the share.
        taken: inputs by stage.
        target: target of the last stage, if it is here.
        made: outputs of all stages but the last.
    """

    share: float
    taken: dict[int, Any]
    target: Any
    made: list[Made]

    @classmethod
    def of(cls, pipeline: Pipeline, rows: SampleRows, share: float, inputs: Any, targets: Any) -> Chain:
        """Run stage after stage; all workers call it."""
        unit, last = slice(rows.start, rows.stop), pipeline.schedule.stages - 1
        taken: dict[int, Any] = {}
        made: list[Made] = []
        for stage in range(last + 1):
            mine = None
            if stage in pipeline.stages:
                if stage == 0:
                    taken[stage] = moved(cut(inputs, unit, pipeline.batching.input_dims), pipeline.device)
                else:
                    taken[stage] = _input_of(stage, made, pipeline.device)
                if stage < last:
                    output = output_of(
                        pipeline.stages[stage], taken[stage], rows, pipeline.steps, with_graph=True
                    )
                    mine = Made.of(output, pipeline.stages[stage])
            told = cast("list[Made | None]", pipeline.transport.gather_objects(mine))
            made += [row for row in told if row is not None][:1]
        target = None
        if last in pipeline.stages:
            target = moved(cut(targets, unit, pipeline.batching.target_dims), pipeline.device)
        return cls(share, taken, target, made)


@dataclass(frozen=True, slots=True)
class Made:
    """The outputs of a stage: to the next one, and by each skip connection past it.

    Attributes:
        following: the output, with additional values for the next stage.
        links: by target, the numbers of values for later stages.
        users: by number, the stages that use the value.
        sizes: by number, size of the value.
        output_bytes: size of the output alone.
    """

    following: _Described
    links: dict[SkipLink, _Described]
    users: dict[int, tuple[int, ...]]
    sizes: dict[int, int]
    output_bytes: int

    @classmethod
    def of(cls, output: Any, copy: LocalStage) -> Made:
        """Outputs of a copy, with their graph."""
        place = f"stage {copy.stage}"

        def described(value: Any, *, once: bool = False) -> _Described:
            structure, tensors = flatten_value(value, place)
            return structure, [(t.shape, t.dtype, t.requires_grad and not once) for t in tensors]

        def size(value: Any) -> int:
            return sum(tensor.nbytes for tensor in flatten_value(value, place)[1])

        skips = copy.skips
        if skips is None or type(output) is not Carried:
            return cls(described(output), {}, {}, {}, size(output))
        value, held = output
        users: dict[int, tuple[int, ...]] = {}
        for link, numbers in skips.gives:
            for number in numbers:
                users[number] = (*users.get(number, ()), link.target)
        for number in skips.next:
            users[number] = (copy.stage + 1, *users.get(number, ()))
        return cls(
            described(Carried(value, {n: held[n] for n in skips.next}) if skips.next else value),
            {link: described({n: held[n] for n in numbers}, once=link.once) for link, numbers in skips.gives},
            users,
            {number: size(held[number]) for number in users},
            size(value),
        )

    def skips(self, stage: int, scale: float) -> tuple[LayerSkip, ...]:
        """Values for later stages; ``scale`` is the number of micro-batches for each sample."""
        once = {link.target for link in self.links if link.once}
        return tuple(
            LayerSkip(
                stage,
                users,
                self.sizes[n] if once & {*users} else round(scale * self.sizes[n]),
                bool(once & {*users}),
            )
            for n, users in sorted(self.users.items())
        )


def _input_of(stage: int, made: Sequence[Made], device: torch.device) -> Any:
    # Values do not affect costs.
    value = _tensors_like(made[-1].following, device)
    by_skips: dict[int, Any] = {}
    for one in made:
        for link, described in one.links.items():
            if link.target == stage:
                by_skips |= _tensors_like(described, device)
    if not by_skips:
        return value
    before = value if type(value) is Carried else Carried(value, {})
    return Carried(before.value, before.skips | by_skips)


def _tensors_like(described: _Described, device: torch.device) -> Any:
    structure, tensors = described
    return unflatten_value(
        structure,
        [
            torch.randn(shape, device=device).to(dtype).requires_grad_(grad)
            if dtype.is_floating_point or dtype.is_complex
            else torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, grad in tensors
        ],
    )


def output_of(
    copy: LocalStage,
    value: Any,
    rows: SampleRows,
    step: int,
    by_layer: LayerSavedBytes | None = None,
    *,
    with_graph: bool = False,
) -> Any:
    """Return a stage's output of some rows; random state and buffers are restored.

    Args:
        copy: the stage.
        value: its input.
        rows: the rows.
        step: number of the step.
        by_layer: count of the bytes that its layers save, whose graphs are made.
        with_graph: True if the output has a graph, and says which of its tensors need gradients.
    """
    wrappers = () if by_layer is None else (by_layer,)
    graph = with_graph or by_layer is not None
    with torch.set_grad_enabled(graph), copy.isolated(layer_wrappers=wrappers):
        return copy.output(value, step, rows)


class OutputHead(RawHead):
    """Head of a measured pass.

    Args:
        tensors_of: returns the tensors of a stage's output that a backward begins with.
    """

    def __init__(self, tensors_of: Callable[[Any], list[Tensor]]) -> None:
        self._tensors_of = tensors_of

    @override
    def __call__(self, output: Any, *, rerun: bool = False) -> Output:
        """Return the tensors of an output, without its structure."""
        del rerun
        return None, self._tensors_of(output)
