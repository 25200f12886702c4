"""Results of forwards of one unit, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from counterflow.verification.diagnosis.comparison import difference
from counterflow.verification.diagnosis.tolerances import MODELS, coarsest

from ..mini_batch.batch import Batch
from ..mini_batch.unit_watch import UnitWatch
from .units import WitnessUnit


class Result(NamedTuple):
    """Result of a forward.

    Attributes:
        output: output of the model.
        loss: mean loss of the unit; None: the batch has no loss.
        draws: whether it drew random numbers.
        undecided: reason why nothing can be compared; empty: there is none.
        failure: error of the forward; empty: there is none.
        stateful: layer that keeps state between forwards; empty: there is none, or none was sought.
    """

    output: Any = None
    loss: float | None = None
    draws: bool = False
    undecided: str = ""
    failure: str = ""
    stateful: str = ""


@dataclass(slots=True)
class Comparison:
    """A comparison that is begun.

    Attributes:
        unit: unit that is compared.
        batch: mini-batch of the unit.
        watch: saves what the schedule computes.
        value: input of the model, on the worker that compares.
        target: target of the unit, on the worker that compares.
        result: result of the model's own forward, on the worker that compares.
    """

    unit: WitnessUnit
    batch: Batch
    watch: UnitWatch | None
    value: Any = None
    target: Any = None
    result: Result | None = None

    def schedule_result(self) -> Result:
        """Result that the schedule computed; of several slices only their mean loss."""
        assert self.watch is not None
        outputs = list(self.watch.outputs.values())
        return Result(outputs[0] if len(outputs) == 1 else None, self.watch.loss())

    def described(
        self,
        name: str,
        losses: tuple[float | None, float | None],
        where: str,
        *,
        layers_agree: bool,
        options: Sequence[str],
    ) -> str:
        """Describe a difference in a sentence.

        Args:
            name: class of the model.
            losses: of the model's own forward, and of the pipeline.
            where: clause that names the first call that differs; empty: none does.
            layers_agree: whether the layers one after another agree with the model's own forward.
            options: options in use by which a schedule runs layers in another way.
        """
        step, number = self.batch.step, self.unit.unit.micro_batch
        model_loss, pipeline_loss = losses
        shown = (
            ""
            if model_loss is None or pipeline_loss is None
            else f" (loss {model_loss:.6g} and {pipeline_loss:.6g})"
        )
        when = f"step {step}" if self.batch.training else f"an evaluation after {step} steps"
        advice = (
            "Find the layers again after what the forward reads has changed, or pass what changes as an input"
        )
        if layers_agree and options:
            where = (
                "its layers one after another agree with it, so they are other functions with "
                + " or ".join(options)
            )
            advice = "Omit it" if len(options) == 1 else "Omit one after another to see which it is"
        elif layers_agree:
            where = (
                "its layers one after another agree with it, so one of them does not depend on its input, "
                "weights and buffers alone: it counts its calls, for instance"
            )
            advice = "Let it keep nothing between its forwards"
        elif not where:
            where = "its layers agree, and what comes after them does not"
        return (
            f"{when}: the {name}'s own forward and the pipeline give micro-batch {number} different "
            f"results{shown}; {where}. {advice}"
        )


def same(expected: Result, got: Result, least: float = 0.0) -> bool:
    """Return whether two results differ by rounding only.

    Args:
        expected: a result with an output.
        got: a result; an output or a loss that is None is not compared.
        least: minimum of the relative difference that counts as rounding.
    """
    dtypes = [
        leaf.dtype
        for leaf in pytree.tree_leaves(expected.output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    limit = MODELS.of(coarsest(dtypes))
    limit = max(limit, least)
    if expected.loss is not None and got.loss is not None and not _near(expected.loss, got.loss, limit):
        return False
    return got.output is None or difference(expected.output, got.output) <= limit


def _near(expected: float, got: float, limit: float) -> bool:
    if math.isfinite(expected) and math.isfinite(got):
        return abs(expected - got) <= limit * max(abs(expected), abs(got))
    return math.isfinite(expected) == math.isfinite(got)
