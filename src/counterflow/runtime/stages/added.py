"""What layers add to the loss goes on beside their stage's output, from stage to stage.

So it needs no message and no gradient of its own kind: messages, recomputation and split backwards treat it
as a part of the output, and its gradient comes back from the loss, multiplied by what the loss weighs.

Invariant: a stage whose layers add nothing, after others that added nothing, gives its output alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.api.aux_loss import COLLECTED, collecting
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor

from ..messages.values import Value
from .features import Feature, Run
from .sample_rows import SampleRows
from .skips import Carried


class WithAdded(NamedTuple):
    """A stage's output and what was added to the loss so far, by name."""

    value: Any
    terms: dict[str, Tensor]


class Adding(Feature):
    """Collects what a stage's layers add to the loss; it is around all other features."""

    adds: bool | None = None
    """Whether its layers added anything so far; None: they did not run yet."""

    @override
    def around_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        before: dict[str, Tensor] = {}
        if type(value) is not Tensor:
            value, before = apart(value)
        graph, worker = torch.is_grad_enabled(), COLLECTED.get()
        if worker is not None and worker.by_stage and not worker.terms:
            worker.graph = graph
            output = run(value, step, rows)
            if found := worker.terms:
                worker.terms = {}
        else:  # it runs beside a worker's ops
            with collecting(graph=graph) as own:
                output = run(value, step, rows)
            found = own.terms
        self.adds = bool(self.adds or found)
        if not (before or found):
            return output
        terms = {name: full_tensor(term) if is_dtensor(term) else term for name, term in found.items()}
        for name, term in before.items():
            terms[name] = terms[name] + term if name in terms else term.clone()
        return together(output, dict(sorted(terms.items())))


def taken() -> dict[str, Tensor]:
    """What a worker's loss function has added to the loss, which collects nothing of it any more."""
    worker = COLLECTED.get()
    if worker is None or not worker.terms:
        return {}
    terms, worker.terms = worker.terms, {}
    return {name: full_tensor(term) if is_dtensor(term) else term for name, term in terms.items()}


def apart(value: Value) -> tuple[Value, dict[str, Tensor]]:
    """A value, and what was added to the loss beside it."""
    if type(value) is WithAdded:
        return value
    if type(value) is Carried and type(value.value) is WithAdded:
        inner, terms = value.value
        return Carried(inner, value.skips), terms
    return value, {}


def together(value: Value, terms: dict[str, Tensor]) -> Value:
    """What ``apart`` takes apart: skips stay outermost."""
    if type(value) is Carried:
        return Carried(WithAdded(value.value, terms), value.skips)
    return WithAdded(value, terms)
