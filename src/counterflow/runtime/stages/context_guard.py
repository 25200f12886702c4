"""Wrapper of layers and loss functions that are given shares of sequences.

A loss function may ask for whole targets (``cf.whole_target``, ``cf.next_target``). A layer is diagnosed on
shares and on whole sequences in its first run, and again in rarer steps
(``verification/diagnosis/shared_layers.py``). In slices the diagnosis of these finds what layers with a
``Carry`` do across them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from counterflow.api.aux_loss import collecting
from counterflow.api.carry import Carry
from counterflow.api.contexts import CONTEXT, Context, gather_shares, gathered
from counterflow.common.doubling import rechecks
from counterflow.common.trees import tensors_in
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.shared_layers import (
    Result,
    SharedLayer,
    Sharing,
    diagnose_shared_layer,
)

from ..messages.values import Value
from .buffers import Buffers
from .carrying import carries_in
from .named_layer import LOSS, NamedLayer, place_of
from .precision import Precision
from .randomness import RandomStreams
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper

_LOG = logging.getLogger(__name__)


class SharedStage(Protocol):
    """A stage as the guard runs it; ``LocalStage`` documents the members."""

    stage: int
    layers: tuple[NamedLayer, ...]
    streams: RandomStreams
    precision: Precision
    buffers: Buffers

    def probing(self) -> AbstractContextManager[None]:
        """Return a context in evaluation mode, without effect on buffers."""

    def layer_runs(self) -> list[tuple[NamedLayer, Run, Sequence[int]]]:
        """Return each layer and its run without the stage's wrappers."""


class ContextGuard(StageWrapper):
    """Wrapper of a stage whose sequences are shared.

    Args:
        context: positions that share them.
        stage: the stage.
    """

    break_reason = "it is given a share of each sequence"

    def __init__(self, context: Context, stage: SharedStage) -> None:
        self._context, self._stage = context, stage
        self._compared_inputs = False
        self._carries = {layer.index: carries_in(layer.module) for layer in stage.layers}
        self._checked: dict[int, int] = {}
        """Last step in which a layer was diagnosed, by its index."""
        self._undecided: set[int] = set()

    @override
    def wrap_layer(self, layer: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        token = CONTEXT.set(self._context)
        try:
            if layer.index == 0 and not self._compared_inputs:
                self._compared_inputs = self._refuse_whole_sequences(value)
            if self._is_due(layer, step):
                self._checked[layer.index] = step
                self._check(layer, value, step, rows)
            return run(value, step, rows)
        finally:
            CONTEXT.reset(token)

    def _is_due(self, layer: NamedLayer, step: int) -> bool:
        # Also on no rows: other positions wait for what this one communicates.
        if layer.index == LOSS or any(carry.expects_slices for carry in self._carries[layer.index]):
            return False
        last = self._checked.get(layer.index)
        return last is None or (last < step and rechecks(step))

    def _refuse_whole_sequences(self, value: Value) -> bool:
        """Refuse inputs that are the same at all positions, as whole sequences would be.

        Returns:
            False: they show nothing, since all elements are equal, as those of a slice of padding.

        Raises:
            ConfigError: they are.
        """
        sums = [_fingerprint(tensor) for tensor in tensors_in(value) if tensor.numel() > 1]
        varied = [tensor for tensor in tensors_in(value) if tensor.numel() > 1 and _varies(tensor)]
        device = self._stage.streams.device
        row = torch.tensor([float(bool(varied)), *sums], dtype=torch.float64, device=device)
        rows = gather_shares(row, self._context.group)
        if all(gathered[0] and gathered.equal(rows[0]) for gathered in rows):
            raise ConfigError(
                "all positions that share sequences are given the same inputs, so each would count its copy "
                "as a share of a longer sequence; give cf.share_sequence(tensor, pipeline.context) of inputs "
                "and targets"
            )
        return any(bool(gathered[0]) for gathered in rows)

    def _check(self, layer: NamedLayer, value: Value, step: int, rows: SampleRows) -> None:
        stage, context = self._stage, self._context.of_slice()
        run = next(run for other, run, _ in stage.layer_runs() if other is layer)
        lower = not stage.precision.plain or torch.is_autocast_enabled(stage.streams.device.type)

        def run_part(part: Value) -> Result | None:
            with collecting() as collected:
                output = stage.streams.unless_drawn(lambda: (run(part, step, rows),))
            return None if output is None else (output[0], dict(collected.terms))

        def run_whole(sequence: Value) -> Result | None:
            with _unshared(self._carries[layer.index]):
                return run_part(sequence)

        def mean(term: Tensor) -> Tensor:
            return torch.stack(gather_shares(term.reshape(1), context.group)).mean()

        shared = SharedLayer(place_of(layer), stage.stage, run_part, run_whole, lower)
        sharing = Sharing(context.share, lambda tensor, dim: gathered(tensor, context, dim), mean)
        norms = [norm for norm, _ in stage.buffers.norms if norm.training]
        with stage.probing(), torch.no_grad():
            for norm in norms:
                norm.training = True  # it normalises by its input, as in a step
            reason = diagnose_shared_layer(shared, sharing, value, rows.stop - rows.start)
        if reason is not None and layer.index not in self._undecided:
            self._undecided.add(layer.index)
            _LOG.warning("%s was not checked on shares of sequences: %s", place_of(layer), reason)


@contextmanager
def _unshared(carries: Sequence[Carry]) -> Iterator[None]:
    contexts, token = [carry.context for carry in carries], CONTEXT.set(None)
    try:
        for carry in carries:
            carry.context = None
        yield
    finally:
        for carry, context in zip(carries, contexts, strict=True):
            carry.context = context
        CONTEXT.reset(token)


def _fingerprint(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1).double()
    return float((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())


def _varies(tensor: Tensor) -> bool:
    return bool((tensor != tensor.reshape(-1)[0]).any())
