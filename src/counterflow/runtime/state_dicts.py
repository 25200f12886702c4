"""What of a pipeline is looked at, saved and loaded: the part of ``Pipeline`` that runs no mini-batch.

Invariant: what asks the other workers is called by all of them, and reaches them as an error if it fails.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from counterflow.errors import ConfigError
from counterflow.execution import Execution
from counterflow.schedule.ir import Op

from .assembly.local_stages import LocalStages
from .assembly.partition import PartitionedModel
from .call_guard import CallGuard
from .execution.evaluation import EvaluationRunner
from .execution.interpreter import timelines
from .execution.runner import Runner
from .execution.step import Step
from .mini_batch.batches import Batches
from .mini_batch.refusal import refusing
from .mini_batch.told import Call
from .parameters.local_state import BY_STAGE, ParameterState
from .parameters.weights import Weights
from .stages.compiled import CompiledLayers
from .stages.randomness import RandomStreams
from .stages.stage import LocalStage
from .transport.base import Transport

_LOG = logging.getLogger("counterflow.runtime.pipeline")


class States(ABC):
    """What a pipeline shows of itself, and the states of its model and its training."""

    execution: Execution
    transport: Transport
    ranks: tuple[tuple[int, ...], ...]
    stages: dict[int, LocalStage]
    weights: Weights
    streams: RandomStreams
    steps: int
    """Steps that were made."""
    _model: PartitionedModel
    _held: LocalStages
    _perhaps_unsplit: set[int]
    """Stages with split backwards of which it is not known yet whether they can be split."""
    _perhaps_compiled: set[int]
    """Compiled stages that have not run yet."""
    _run: Runner
    _evaluation: EvaluationRunner
    _batches: Batches
    _calls: CallGuard
    _untold: list[Step]

    @abstractmethod
    def flush(self) -> list[Step]:
        """End what is in flight, so that all weights are as after the last step; all workers call it."""

    @property
    def in_flight(self) -> bool:
        """Whether a ``flush`` would have something to do."""
        return self._run.in_flight or self._evaluation.in_flight

    # -- looking at it

    @contextmanager
    def traced(self) -> Iterator[Callable[[], list[list[tuple[Op, float, float]]]]]:
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
        with self._run.interpreter.trace():
            yield self.timeline

    def timeline(self, replica: int = 0) -> list[list[tuple[Op, float, float]]]:
        """The ops of the last step, or of a trace so far, by worker of a replica; all workers call it.

        Args:
            replica: whose; each worker may ask for another one.

        Returns:
            By worker the ops in their order, with start and end in seconds. Asynchronous schemes count
            micro-batches and versions from the last flush, synchronous ones in each step from 0.
        """
        with self._reported():
            self._calls.agree(Call.TIMELINE, self.steps)
            return timelines(self.transport, self._run.interpreter, self.ranks[replica])

    @property
    def warm_up_steps(self) -> int:
        """Steps from an empty pipeline until all steps are alike; 0 in synchronous schemes."""
        return self._run.warm_up_steps

    @property
    def loss_scale(self) -> float | None:
        """What the losses of the next step are multiplied by, on every worker; None: they are not scaled."""
        scaling = self.weights.loss_scale
        return None if scaling is None else scaling.scale

    @property
    def counted_steps(self) -> int:
        """First steps in which bytes are counted: as asked for, and those until all periods are alike."""
        return self.execution.count_memory_steps + self._run.warm_up_steps

    @property
    def peak_saved_bytes(self) -> int:
        """Most bytes that autograd kept for backward on this worker at once, in the steps counted."""
        return self._run.interpreter.saved.peak

    @property
    def peak_versions(self) -> dict[int, int]:
        """The most versions of its weights that were held at once, for each stage of this worker."""
        return {s: c.versions.peak if c.versions is not None else 1 for s, c in self.stages.items()}

    @property
    def unsplit(self) -> tuple[int, ...]:
        """The stages of this worker whose backward the schedule splits and that cannot be split.

        Known after their first backward. Their weights' gradients are made with the input gradient: they run
        in custom functions (compiled layers, reentrant checkpoints), are used several times, or are vectors.
        """
        return tuple(stage for stage in self._held.split if self.stages[stage].splitting.waits is False)

    def _tell_unsplit(self) -> None:
        known = {s for s in self._perhaps_unsplit if self.stages[s].splitting.waits is not None}
        self._perhaps_unsplit -= known
        for stage in sorted(known & set(self.unsplit)):
            _LOG.warning(
                "the backward of stage %d cannot be split: its weights' gradients are made with the input "
                "gradient, because a custom function (a compiled layer, a checkpoint) makes both at once, or "
                "they are used several times, or are vectors; a scheme with whole backwards costs no more",
                stage,
            )

    @property
    def compiled(self) -> dict[int, tuple[CompiledLayers, ...]]:
        """What is compiled as one function in training, by stage of this worker; empty without ``compile``.

        Consecutive layers are one function where nothing is around each of them. Each one that is alone says
        why (``alone``): it draws random numbers, has skips, is computed again by itself, or its stage's
        backward is split. ``graphs`` is 1 where torch's compiler breaks nothing. Known after the first step.
        """
        every = {stage: copy.compiled_layers() for stage, copy in self.stages.items()}
        return {stage: found for stage, found in every.items() if found}

    def _tell_compiled(self) -> None:
        known = {stage for stage in self._perhaps_compiled if self.stages[stage].checked}
        self._perhaps_compiled -= known
        for stage in sorted(known):
            told = ", ".join(map(str, self.compiled[stage]))
            _LOG.info("stage %d is compiled: %s", stage, told)

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Optimisers of this worker's stages with trainable weights, by stage."""
        return self.weights.optimizers

    @property
    def keeps_gradients(self) -> bool:
        """Whether ``gradients`` are kept."""
        return self.weights.keeps_gradients

    @keeps_gradients.setter
    def keeps_gradients(self, keeps: bool) -> None:
        self.weights.keeps_gradients = keeps

    @property
    def gradients(self) -> dict[str, Tensor]:
        """With ``keeps_gradients``: this worker's gradients of the last update, summed, divided and clipped.

        By name, in the parameters' dtypes; a snapshot, which later steps leave as it is.
        """
        return dict(self.weights.kept_gradients)

    def ema(self, decay: float) -> None:
        """Keep an exponential moving average of the trained weights from here on; all workers call it.

        After each update of a stage its average becomes ``decay`` times itself and ``1 - decay`` times the
        new weights, and at the first one the weights, as ``torch.optim.swa_utils.AveragedModel`` with
        ``get_ema_multi_avg_fn(decay)`` does. A skipped update, or a step without one, leaves it as it is.
        It takes the memory of the weights once more, in float32 where they are of lower precision; with
        ``zero_stage`` 1 it is with the optimiser's state. Frozen weights and buffers are the model's own.

        ``averaged``, ``model_state_dict(ema=True)`` and ``stream_weights(ema=True)`` return it. States,
        checkpoints and copies in memory contain it: call ``ema`` before they are loaded.
        ``load_model_state_dict`` restarts it.

        Args:
            decay: from 0 to less than 1, the same on all workers.

        Raises:
            ConfigError: there is no such decay, workers give others, or gradients wait for an update.
        """
        self.settle("ema")
        with self._reported():
            self._calls.agree(Call.EMA, self.steps)
            with refusing():  # on all workers alike
                self.weights.follow(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context ``evaluate`` and ``predict`` are those of the average; all workers enter it.

        Flushes first what is in flight. This worker's weights are kept once more meanwhile.

        Raises:
            ConfigError: there is no average, or the context is entered twice.
        """
        self._calls.require_original_weights("averaged()")
        self._untold = self.flush()
        with ExitStack() as shown:
            with self._reported():
                self._calls.agree(Call.AVERAGED, self.steps)
                shown.enter_context(self.weights.averaged())
            self._calls.averaged = True
            try:
                yield
            finally:
                self._calls.averaged = False

    def model_state_dict(
        self, *, rank: int | None = None, local: bool = False, ema: bool = False
    ) -> dict[str, Any]:
        """The model's parameters, buffers and extra state by its own names, on the CPU; all workers call it.

        Work in flight is flushed first. Tensors are sent one by one from their holders to the workers that
        receive the model. If the whole model is too large for any worker, let each return its own part
        (``local=True``), or let one receive it tensor by tensor (``stream_weights``).

        Args:
            rank: the only rank that receives the model; the others get an empty dict. None: all receive it.
            local: whether to return only this worker's part, without communication.
            ema: whether trained weights are their averages, in the weights' precision.

        Raises:
            ConfigError: the rank or the average does not exist.
            WorkerError: the copies of a stage differ.
        """
        if local:
            self._calls.require_idle("model_state_dict(local=True)")
            with self.weights.averaged() if ema else nullcontext():
                return self.weights.state.state_dict()
        with self._reported():
            state = dict(self._streamed(rank, ema=ema))
        order = {name: number for number, name in enumerate(self._model.order)}
        return dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))

    def stream_weights(self, rank: int = 0, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """What ``model_state_dict`` has, name by name on one rank, which has one tensor at a time in memory.

        All workers call it. On ``rank`` it gives names with their values, and all are taken before the next
        call of the pipeline: who stops in the midst (``break``) takes the rest unseen. On the other ranks it
        sends what they hold, gives nothing, and returns when ``rank`` has taken all; they wait for the next
        tensor to be taken as long as for anything else (``timeout_seconds``).

        Args:
            rank: who gets it.
            ema: whether trained weights are their averages, in the weights' precision.

        Raises:
            ConfigError: there is no such rank, or no average.
            WorkerError: the copies of a stage differ, or ``rank`` takes nothing for too long.
        """
        with self._reported():
            found = self._streamed(rank, ema=ema)
            if self.transport.rank != rank:
                return iter(list(found))
            self._calls.streams = True
        return self._taking(found)

    def _streamed(self, rank: int | None, *, ema: bool) -> Iterator[tuple[str, Any]]:
        if rank is not None and not 0 <= rank < self.transport.world_size:
            raise ConfigError(f"rank={rank}; there are ranks 0 to {self.transport.world_size - 1}")
        self._calls.require_original_weights("the state")
        self._untold = self.flush()
        self._calls.agree(Call.STATE_DICT, self.steps)
        self.weights.check_copies(f"after {self.steps} steps")
        return self._averages(rank) if ema else self.weights.state.stream(rank)

    def _averages(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        with self.weights.averaged():
            yield from self.weights.state.stream(rank)

    def _taking(self, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Iterate over ``found`` to its end, even if the caller stops early."""
        try:
            while (pair := self._next(found)) is not None:
                yield pair
        finally:
            while self._next(found) is not None:
                pass
            self._calls.streams = False

    def _next(self, found: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._calls.reported(self.steps, taking=True):
            return next(found, None)

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's weights from a whole model's state, or from any part that has all it holds.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        self._calls.require_idle("load_model_state_dict")
        self.weights.state.load_state_dict(state)

    def state_dict(self, *, rank: int | None = None, local: bool = False) -> dict[str, Any]:
        """Everything that a training resumes from, on the CPU; all workers call it.

        The pipeline is flushed first. Another pipeline of the same model and optimiser loads the state under
        any schedule; a learning-rate scheduler needs the same number of stages. With ``load_state_dict``
        this is the ``Stateful`` of ``torch.distributed.checkpoint``:
        ``dcp.save({"pipeline": pipeline})`` writes it, ``dcp.load`` reads it into a new pipeline.

        Args:
            rank: the only one that gets it; the others get an empty dict. None: all get it.
            local: only what this worker holds, without asking the others; with ``zero_stage`` 1, of the
                optimisers what it updates.

        Returns:
            ``model`` as ``model_state_dict`` returns it; in ``optimizer``, by parameter's name, a
            ``ParameterState``: what the optimiser keeps of it and the options of its group; in ``scheduler``,
            by stage (as text), its state; ``step`` and ``seed``, from which all random draws come. If losses
            are scaled, ``loss_scale`` has the scale and the updates since it changed, by stage, for which it
            is the same.

        Raises:
            ConfigError: gradients wait for an update, ``local`` while mini-batches are in flight, or there is
                no such rank.
            WorkerError: the copies of a stage differ.
        """
        self._calls.require_no_pending_gradients("state_dict")
        model = self.model_state_dict(rank=rank, local=local)
        with self._reported():
            rest = (
                self.weights.state.training_state()
                if local
                else self.weights.state.whole_training_state(rank)
            )
        if not local and rank not in (None, self.transport.rank):
            return {}
        kept = {name: ParameterState(**kept) for name, kept in rest.pop("optimizer").items()}
        stages = {kind: _with_keys(str, rest.pop(kind)) for kind in BY_STAGE if kind in rest}
        return {
            "model": model,
            "optimizer": kept,
            **stages,
            **rest,
            "step": self.steps,
            "seed": self.streams.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``state_dict`` returned, or from any part that has all this worker holds.

        Raises:
            ConfigError: a name is missing, or something does not fit; or gradients wait for an update.
        """
        self._calls.require_no_pending_gradients("load_state_dict")
        if missing := [
            name for name in ("model", "optimizer", "scheduler", "step", "seed") if name not in state
        ]:
            raise ConfigError(
                f"the state has no {missing[0]!r}: load_state_dict resumes from what state_dict() returned; "
                "a model's weights alone are loaded by load_model_state_dict"
            )
        self.load_model_state_dict(state["model"])
        stages = {kind: _with_keys(int, state[kind]) for kind in BY_STAGE if kind in state}
        self.weights.state.load_training_state({**state, **stages})
        self.steps, self.streams.seed = state["step"], state["seed"]

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters from the next step on; all workers call it alike.

        Flushes first what is in flight.

        Args:
            chosen: a parameter's name in the model to whether it is trained.

        Raises:
            ConfigError: gradients wait for an update; or workers that hold a parameter choose differently,
                and then nothing is changed.
        """
        self._calls.require_no_pending_gradients("set_trainable")
        self._untold = self.flush()
        with self._reported():
            self._calls.agree(Call.SET_TRAINABLE, self.steps)
            self.weights.set_trainable(chosen)
            self._batches.forget()

    def settle(self, call: str) -> None:
        """Flush what is in flight, for ``call``; ``flush`` returns the steps later. All workers call it.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._calls.require_no_pending_gradients(call)
        self._untold = self.flush()

    def _reported(self) -> AbstractContextManager[None]:
        """Context in which an error is reported to the other workers."""
        return self._calls.reported(self.steps)


def _with_keys(kind: Callable[[Any], Any], by_stage: Mapping[Any, Any]) -> dict[Any, Any]:
    """A mapping with its keys converted: ``torch.distributed.checkpoint`` accepts only texts."""
    return {kind(stage): value for stage, value in by_stage.items()}
