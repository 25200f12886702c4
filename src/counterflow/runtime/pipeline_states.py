"""States of a pipeline as its user sees them: saved, loaded, streamed and averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .engine import Engine


class PipelineStates:
    """Methods of ``Pipeline`` that return, load and average the states of a model and its training."""

    _engine: Engine

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
        self._engine.state_dicts.start_ema(decay)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which ``evaluate`` and ``predict`` use the average; all workers enter it.

        Flushes first what is in flight. This worker's weights are kept once more meanwhile.

        Raises:
            ConfigError: there is no average, or the context is entered twice.
        """
        return self._engine.state_dicts.averaged()

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
        return self._engine.state_dicts.model(rank=rank, local=local, ema=ema)

    def local_weights(self, *, ema: bool = False) -> AbstractContextManager[dict[Sequence[str], Any]]:
        """Parameters, buffers and extra state of this worker within a context, where they are, not copied.

        Sharded weights and divided experts are DTensors. In the context no other call of the pipeline is
        made; with ``ema`` all workers enter it.

        Args:
            ema: whether trained weights are their averages, in the weights' precision.

        Returns:
            Context with a dict of values by all names of each in the model.

        Raises:
            ConfigError: mini-batches are in flight, or there is no average.
        """
        return self._engine.state_dicts.local_weights(ema=ema)

    def stream_weights(self, rank: int = 0, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """Names and values of ``model_state_dict`` on one rank, with one tensor at a time in memory.

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
        return self._engine.state_dicts.stream(rank, ema=ema)

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's weights from a whole model's state, or from any part that has all it holds.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        self._engine.state_dicts.load_model(state)

    def state_dict(self, *, rank: int | None = None, local: bool = False) -> dict[str, Any]:
        """Everything that a training resumes from, on the CPU; all workers call it.

        The pipeline is flushed first. Another pipeline of the same model and optimiser loads the state under
        any schedule and depth. With ``load_state_dict`` this is the ``Stateful`` of
        ``torch.distributed.checkpoint``: ``dcp.save({"pipeline": pipeline})`` writes it,
        ``dcp.load`` reads it into a new pipeline.

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
        return self._engine.state_dicts.training(rank=rank, local=local)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``state_dict`` returned, or from any part that has all this worker holds.

        Raises:
            ConfigError: a name is missing, or something does not fit; or gradients wait for an update.
        """
        self._engine.state_dicts.load_training(state)

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters from the next step on; all workers call it alike.

        Flushes first what is in flight.

        Args:
            chosen: a parameter's name in the model to whether it is trained.

        Raises:
            ConfigError: gradients wait for an update; or workers that hold a parameter choose differently,
                and then nothing is changed.
        """
        self._engine.state_dicts.set_trainable(chosen)
