"""Auxiliary losses that layers add: they are passed on with the stage's output, from stage to stage.

So they need no message and no gradient of their own kind: messages, recomputation and split backwards treat
them as a part of the output, and their gradient is received from the loss, multiplied by the loss weight.

Invariant: a stage whose layers add nothing, after stages that added nothing, returns its output alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.api.aux_loss import COLLECTED, collecting
from counterflow.api.skip import Carried
from counterflow.common.tensors.dtensors import full_tensor, is_dtensor

from ..messages.values import Value
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


class WithAuxLosses(NamedTuple):
    """Output of a stage, and the auxiliary losses so far by name."""

    value: Any
    terms: dict[str, Tensor]


class AuxLossCollector(StageWrapper):
    """Collects the auxiliary losses of a stage's layers; the outermost wrapper."""

    collects: bool | None = None
    """True if the layers added a loss so far; None: they did not run yet."""

    @override
    def wrap_stage(self, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        before: dict[str, Tensor] = {}
        if type(value) is not Tensor:
            value, before = split_aux_losses(value)
        graph, worker = torch.is_grad_enabled(), COLLECTED.get()
        if worker is not None and worker.by_stage and not worker.terms:
            worker.graph = graph
            output = run(value, step, rows)
            if added := worker.terms:
                worker.terms = {}
        else:  # a run outside the worker's ops
            with collecting(graph=graph) as collected:
                output = run(value, step, rows)
            added = collected.terms
        self.collects = bool(self.collects or added)
        if not (before or added):
            return output
        terms = {name: full_tensor(term) if is_dtensor(term) else term for name, term in added.items()}
        for name, term in before.items():
            terms[name] = terms[name] + term if name in terms else term.clone()
        return join_aux_losses(output, dict(sorted(terms.items())))


def pop_aux_losses() -> dict[str, Tensor]:
    """Return the auxiliary losses that the worker's loss function added, and stop collecting them."""
    worker = COLLECTED.get()
    if worker is None or not worker.terms:
        return {}
    terms, worker.terms = worker.terms, {}
    return {name: full_tensor(term) if is_dtensor(term) else term for name, term in terms.items()}


def split_aux_losses(value: Value) -> tuple[Value, dict[str, Tensor]]:
    """Split a stage's output into the value and the auxiliary losses by name."""
    if type(value) is WithAuxLosses:
        return value
    if type(value) is Carried and type(value.value) is WithAuxLosses:
        inner, terms = value.value
        return Carried(inner, value.skips), terms
    return value, {}


def join_aux_losses(value: Value, terms: dict[str, Tensor]) -> Value:
    """Inverse of ``split_aux_losses``: skips stay outermost."""
    if type(value) is Carried:
        return Carried(WithAuxLosses(value.value, terms), value.skips)
    return WithAuxLosses(value, terms)
