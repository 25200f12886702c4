"""Properties of a pipeline's run as its user sees them: times of its ops, bytes, versions, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from counterflow.api.contexts import Share
from counterflow.schedule.ir import Schedule

from .engine import Engine
from .inspection import Timelines
from .mesh.weight_table import WeightTable, weight_table
from .stages.captures import CapturedStage
from .stages.compiled import CompiledLayers
from .stages.stage import LocalStage
from .transport.base import Transport


class PipelineProperties:
    """Methods and properties of ``Pipeline`` that show a run and its results."""

    transport: Transport
    schedule: Schedule
    stages: Mapping[int, LocalStage]
    _engine: Engine

    def traced(self) -> AbstractContextManager[Callable[[], Timelines]]:
        """Time all ops of the steps in a ``with`` block, not only those of the last step.

        Steps of an asynchronous scheme, or without a barrier, overlap: a trace has several of them whole.

        Yields:
            The method ``timeline``, which all workers call in the block.

        Examples:
            with pipeline.traced() as timeline:
                for inputs, targets in batches:
                    pipeline.step(inputs, targets)
                ops_by_worker = timeline()
        """
        return self._engine.inspection.traced()

    def timeline(self, replica: int = 0) -> Timelines:
        """The ops of the last step, or of a trace so far, by worker of a replica; all workers call it.

        Args:
            replica: whose; each worker may ask for another one.

        Returns:
            By worker the ops in their order, with start and end in seconds. Asynchronous schemes count
            micro-batches and versions from the last flush, synchronous ones in each step from 0.
        """
        return self._engine.inspection.timeline(replica)

    @property
    def warm_up_steps(self) -> int:
        """Steps from an empty pipeline until all steps are alike; 0 in synchronous schemes."""
        return self._engine.runner.warm_up_steps

    @property
    def loss_scale(self) -> float | None:
        """Factor of the losses of the next step, on every worker; None: they are not scaled."""
        scaling = self._engine.weights.loss_scale
        return None if scaling is None else scaling.scale

    @property
    def counted_steps(self) -> int:
        """First steps in which bytes are counted: as asked for, and those until all periods are alike."""
        return self._engine.training.counted_steps

    @property
    def peak_saved_bytes(self) -> int:
        """Most bytes that autograd kept for backward on this worker at once, in the steps counted."""
        return self._engine.runner.interpreter.saved.peak

    @property
    def reads_inputs(self) -> bool:
        """True if ``step`` reads inputs on this worker, since it holds the first stage; else None will do."""
        return 0 in self.stages

    @property
    def reads_targets(self) -> bool:
        """True if ``step`` reads targets on this worker, since it holds the last stage; else None will do."""
        return self.schedule.stages - 1 in self.stages

    @property
    def data(self) -> Share:
        """Share of the samples that this worker is given: ``inputs.chunk(data.count)[data.number]``.

        As ``replica`` of ``replicas``, but for positions that share sequences, which have the same samples.
        """
        dims = self._engine.local.dims
        return dims.share(self.transport.rank, dims.samples - dims.contexts)

    @property
    def context(self) -> Share:
        """Share of each sequence that this worker is given, for ``cf.share_sequence``; (0, 1): all of it.

        Its ``lengths`` are those of the schedule's slices: each slice is shared.
        """
        engine = self._engine
        share = engine.local.dims.share(self.transport.rank, engine.local.dims.contexts)
        return replace(share, lengths=engine.model.schedule.workload.lengths) if share.count > 1 else share

    def explain(self) -> WeightTable:
        """Table of the model's weights, equal on all workers; printing it gives its text.

        For each group of weights: the ranks that hold them, whether these hold the same, shards or other
        experts, over which ranks gradients are summed and by whom, and whose part counts in the norm.
        """
        engine = self._engine
        return weight_table(engine.local.dims, engine.further_dims, engine.model.names, engine.model.holders)

    @property
    def peak_versions(self) -> dict[int, int]:
        """The most versions of its weights that were held at once, for each stage of this worker."""
        return {
            s: c.versions.peak if c.versions is not None else 1 for s, c in self._engine.local.stages.items()
        }

    @property
    def unsplit(self) -> tuple[int, ...]:
        """The stages of this worker whose backward the schedule splits and that cannot be split.

        Known after their first backward. Their weights' gradients are made with the input gradient: they run
        in custom functions (layers that the user compiled, reentrant checkpoints), are used several times, or
        are vectors.
        """
        return self._engine.inspection.unsplit

    @property
    def compiled(self) -> dict[int, tuple[CompiledLayers, ...]]:
        """Layers compiled as one function in training, by stage of this worker; empty without ``compile``.

        Consecutive layers are one function where nothing is around each of them. Each one that is alone says
        why (``alone``): it draws random numbers, has skips, is computed again by itself, or its stage's
        backward is split. ``graphs`` is 1 where torch's compiler breaks nothing. Known after the first step.
        """
        return self._engine.inspection.compiled

    @property
    def captured(self) -> dict[int, CapturedStage]:
        """Report on the CUDA graphs of each stage of this worker; empty without ``capture``.

        A stage is captured after its first plain steps. One that cannot be says why (``reason``).
        """
        return self._engine.inspection.captured

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Optimisers of this worker's stages with trainable weights, by stage."""
        return self._engine.weights.optimizers

    @property
    def keeps_gradients(self) -> bool:
        """True if ``gradients`` are kept."""
        return self._engine.weights.keeps_gradients

    @keeps_gradients.setter
    def keeps_gradients(self, keeps: bool) -> None:
        self._engine.weights.keeps_gradients = keeps

    @property
    def gradients(self) -> dict[str, Tensor]:
        """With ``keeps_gradients``: this worker's gradients of the last update, summed, divided and clipped.

        By name, in the parameters' dtypes; a snapshot, which later steps leave as it is.
        """
        return dict(self._engine.weights.kept_gradients)
