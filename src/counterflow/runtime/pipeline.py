"""The pipeline: a model, a schedule and an optimiser on the workers of this run.

Invariant: every worker makes the same calls in the same order. The agreements of all workers at the beginning
and the end of a step (samples, shapes, loss, norm) take one small gather each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, Self, Unpack

import torch
from torch import Tensor, nn

from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution, Flat, records
from counterflow.schedule.ir import Schedule
from counterflow.schedule.registry import schedule_of

from .assembly.auto_schedule import AUTO, CHOOSERS, ScheduleChoice, ScheduleRequest, request_of
from .assembly.partition import PartitionedModel
from .assembly.pipeline_arguments import PipelineArguments
from .engine import build_engine
from .execution.evaluation import PendingEvaluation
from .execution.step import Evaluation, Step
from .footprint.count import MemorySubject, count_memory, shared_count
from .footprint.first_step import FirstStep
from .footprint.footprint import Memory
from .generation import Sampling
from .mesh.parallel import Parallelize
from .mesh.rank_mesh import Mesh
from .mini_batch.loss_output import LossFunction
from .mini_batch.step_report import CallKind
from .parameters.optimizers import MakeOptimizer, MakeScheduler
from .pipeline_properties import PipelineProperties
from .pipeline_states import PipelineStates
from .settable import refuse_setting
from .transport.base import Transport
from .transport.worker_watch import raises_worker_error
from .workers.world import current_transport

__all__ = ["AUTO", "CHOOSERS", "Pipeline", "ScheduleChoice", "ScheduleRequest"]


class Pipeline(PipelineStates, PipelineProperties):
    """Trains a model in pipeline stages, as a schedule says.

    Made on every worker with the same arguments: under torchrun or Slurm, or in a function that
    ``counterflow.launch`` runs.

    Args:
        model: an ``nn.Sequential``, a list of layers, each taking the previous one's output (a tensor or a
            tuple of two or more tensors), or any module together with ``list_layers``. Layers on the meta
            device are made and initialised on their own workers only. The layers of this worker are trained
            themselves; those of others lose their numbers here, and their use is refused.
        loss_function: output of the last layer and target to the mean loss over the samples, to (loss, dict
            of metrics), or to a ``LossSum``. None: the last layer's output is one of them, or a dict or
            object with a ``loss``; no targets are needed then. Weights of a module are trained with the last
            stage; states have them, and its buffers, as ``loss_function.<name>``, but for what torch's own
            losses were given (weights of classes).
        schedule: a schedule that the checker accepts, or a scheme with its sizes as text:
            ``"zb-v(workers=4, micro_batches=8)"``. An asynchronous one needs enough periods to show what
            repeats, and continues for as many steps as are made. ``"auto"``: the model is measured on the
            workers, which become one pipeline, the plan with the shortest step within their memory is taken,
            and one line says which, why, and what the second-best costs; the profile is cached.
        optimizer: a function of parameters to an optimiser; called once a stage a worker holds, with all
            its parameters, also those that are frozen. Where the model has several optimisers, it is called
            two or three times more with small copies of some, to see that it looks at each for itself.
        scheduler: a function of an optimiser to a learning-rate scheduler, stepped after each update.
        list_layers: the layers of ``model``, if it is neither a sequential nor a list.
        example: in place of ``list_layers``, inputs as ``step`` takes them: the layers of ``model`` are found
            by itself, as ``cf.layers(model, example)`` finds them. With ``schedule="auto"`` a mini-batch of
            the size of a step: (inputs, targets).
        cuts: the numbers of the layers with which stages 1, 2, ... begin; or a layout of Megatron-LM of the
            list of layers (embedding, blocks, head), ``"Ett|tt|ttL"``; by default balanced.
        costs: cost of each layer, to balance by; by default estimated from the parameters.
        mesh: a DeviceMesh of (replica, worker), or the ranks of each replica's workers, as
            ``[[0, 1], [2, 3]]``; by default rank = replica * workers + worker. Further dimensions are for
            ``parallelize``.
        parallelize: a function of a stage's layers and the mesh of the further dimensions that shards these
            layers' weights in place, by ``fully_shard`` or ``parallelize_module``; called for each stage a
            worker holds. Positions along dimensions that FSDP shards over count as replicas, with samples of
            their own; those along others are given the same samples.
        transport: ``local``, ``gloo`` or ``nccl``, or one at hand; by default as the process was started.
        device: where to compute; by default the transport's.
        execution: how the schedule is executed: recomputation, clipping, precision, seed and so on.
        batching: how mini-batches are cut, if not along their tensors' first dimensions.
        options: fields of ``Execution`` and ``Batching``, in place of the records or beside them.

    Raises:
        ConfigError: the model, the schedule and the workers do not fit together; an option is unknown, not
            legal or given twice; or, in an asynchronous scheme, stages share weights.
        ScheduleError: the checker does not accept the schedule.
        WorkerError: another worker failed.
    """

    _sealed = False
    """Whether the pipeline is made, and its options are what they are."""

    @raises_worker_error
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_function: LossFunction | None,
        schedule: Schedule | str,
        *,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        example: Any = None,
        cuts: Sequence[int] | str | None = None,
        costs: Sequence[float] | None = None,
        mesh: Mesh | None = None,
        parallelize: Parallelize | None = None,
        transport: Transport | str | None = None,
        device: torch.device | str | None = None,
        execution: Execution | None = None,
        batching: Batching | None = None,
        **options: Unpack[Flat],
    ) -> None:
        execution, batching = records(execution, batching, options, PARAMETERS)
        self.choice: ScheduleChoice | None = None
        """Choice of ``schedule="auto"``, with its ``text``; None for another schedule."""
        if isinstance(schedule, str) and schedule == AUTO:
            if AUTO not in CHOOSERS:
                raise ConfigError('schedule="auto" is that of counterflow.Pipeline: import it from there')
            if isinstance(transport, Transport):
                raise ConfigError(
                    'schedule="auto" measures on the transport of the launch; leave out transport, or name '
                    "the schedule"
                )
            transport = current_transport(
                transport,
                device=device,
                timeout_seconds=execution.timeout_seconds,
                alone=True,
            )
            fixed = {"cuts": cuts, "costs": costs, "mesh": mesh, "parallelize": parallelize}
            request, list_layers = request_of(
                *(model, loss_function, example, list_layers),
                optimizer=optimizer,
                execution=execution,
                batching=batching,
                fixed=fixed,
            )
            choice = CHOOSERS[AUTO](request, transport)
            schedule, cuts, execution = choice.schedule, choice.cuts, choice.execution
            self.choice, example = choice, None
        arguments = PipelineArguments(
            model,
            loss_function,
            schedule_of(schedule, {}),
            execution,
            batching,
            optimizer=optimizer,
            scheduler=scheduler,
            list_layers=list_layers,
            example=example,
            cuts=cuts,
            costs=costs,
            mesh=mesh,
            parallelize=parallelize,
            transport=transport,
            device=device,
        ).checked()
        self._arguments = arguments
        self.transport = arguments.open_transport()
        self._engine = engine = build_engine(arguments, self.transport, self)
        local, workers = engine.local, engine.workers
        self.execution, self.batching = execution, batching
        self.schedule, self.cuts = engine.model.schedule, engine.model.cuts
        self.device = self.transport.device
        self.ranks, self.replicas = workers.ranks, workers.replicas
        self.replica, self.worker = workers.replica, workers.worker
        self.stages, self.loss_function, self.dims = local.stages, local.loss_function, local.dims
        self.weights, self.streams, self.compression = engine.weights, engine.streams, engine.compression
        if execution.count_memory_steps:
            layers = () if self.dims.further else engine.model.layers
            modules = [[layer.module for layer in stage] for stage in layers]
            engine.training.first_step = FirstStep(
                self.schedule, execution, workers, self.weights, modules, self._counted
            )
        engine.lease.ready = self._sealed = True

    def close(self) -> None:
        """End what is in flight and give back what the pipeline holds of its transport; all workers call it.

        A pipeline that is dropped without it gives that back when the next one is made. Also a context
        manager: ``with cf.Pipeline(...) as pipeline: ...``. After a call that failed nothing is left to end.
        """
        if not (self._engine.lease.closed or self._engine.guard.failed):
            self.flush()
            with self._engine.guard.reported():
                self._engine.guard.agree(CallKind.CLOSE)
                self._engine.lease.close()

    def layer_in_use(self, model: PartitionedModel) -> str | None:
        """First layer of ``model`` whose earlier weights the mini-batches in flight need; None: no layer."""
        busy = self._engine.runner.in_flight and not self.schedule.synchronous
        return model.layer_in_common(self._engine.model) if busy else None

    def __setattr__(self, name: str, value: object) -> None:
        """Set what a pipeline lets its user set: ``keeps_gradients`` and ``steps``.

        Raises:
            AttributeError: it is an option, which is given when the pipeline is made, or no attribute.
        """
        if self._sealed:
            refuse_setting(self, name, value, PARAMETERS)
        super().__setattr__(name, value)

    def __reduce__(self) -> Never:
        """Pipelines cannot be copied or pickled."""
        raise ConfigError("a pipeline cannot be copied or pickled; keep its state_dict()")

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; after an error nobody waits for anybody."""
        if kind is None:
            self.close()

    # -- steps

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
        update: bool = True,
        outputs: bool = False,
    ) -> Step:
        """Train on the replica's mini-batch, each module in the mode (training, evaluation) it is in.

        With ``update=False`` the gradients are kept: the next update uses the gradients of the mean loss over
        all samples since the last update, and ``grad_norm`` is reported then.

        If there are fewer samples than micro-batches, the last micro-batches are empty and are not computed.

        In asynchronous schemes, a step begins its mini-batch and leaves part of it to the next steps, or to
        ``flush``; until then all mini-batches must have the same shapes. The same holds without a barrier.

        Args:
            inputs: a tensor, or tensors in any structure, with the samples in ``input_dims``; read on workers
                with the first stage. Numbers, texts and None in it go to all micro-batches.
            targets: tensors with the samples in ``target_dims``; read on workers with the last stage.
            kwargs: keyword arguments to the first layer, cut like the inputs, in ``kwarg_dims``.
            micro_batches: in place of all these, (inputs, targets) or (inputs, targets, kwargs) of each
                micro-batch, as many as the schedule has; lengths may differ. Of an iterator, the next ones.
            samples: number of samples of each micro-batch, which weights its loss; needed if no dimension
                determines it. With ``input_dims=None`` the targets determine it, and with
                ``target_dims=None`` the inputs; with both, each micro-batch counts as one sample.
            update: whether the weights are updated; False only in synchronous schemes.
            outputs: whether to return ``Step.outputs``; only in synchronous schemes.

        Raises:
            ConfigError: the mini-batch is empty or missing, or its tensors have different numbers of samples.
                Where no worker has begun with it, the pipeline is as before the step.
            WorkerError: a worker failed, or the loss or a gradient is not finite. The pipeline is closed
                then, as after all errors but that one, and later calls repeat the error.
        """
        user_batch = partial(self._engine.batches.user_batch, inputs, targets, kwargs, micro_batches, samples)
        return self._engine.training.step(user_batch, update=update, outputs=outputs)

    def flush(self) -> list[Step]:
        """End what is in flight, so all weights are those after the last step; all workers call it.

        After a step of a synchronous schedule with a barrier nothing is in flight. In an asynchronous scheme
        the next step warms up again.

        Returns:
            Steps whose loss and norm no step has reported.

        Raises:
            WorkerError: a worker failed, or a loss is not finite.
        """
        return self._engine.drain.flush()

    @property
    def steps(self) -> int:
        """Number of steps that were made."""
        return self._engine.guard.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._engine.guard.steps = steps

    @property
    def in_flight(self) -> bool:
        """True if a ``flush`` would have something to do."""
        return self._engine.drain.in_flight

    def settle(self, call: str) -> None:
        """Flush what is in flight, for ``call``; ``flush`` returns the steps later. All workers call it.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._engine.state_dicts.settle(call)

    def memory(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Sequence[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
    ) -> Memory:
        """Count the memory of each worker in a step on such a mini-batch, without one; all workers call it.

        The first worker counts as ``cf.memory`` does, and all get the result. A warning is logged if a worker
        needs more than is available.

        Args:
            inputs: as of ``step``, but on the first worker too whatever its stages; of numbers only the
                shapes count, so tensors may be on the meta device.
            targets: as of ``step``.
            kwargs: as of ``step``.
            micro_batches: as of ``step``.
            samples: as of ``step``.

        Raises:
            ConfigError: the memory depends on values, or ``parallelize`` shards weights.
        """
        batch = {
            "inputs": inputs,
            "targets": targets,
            "kwargs": kwargs,
            "micro_batches": micro_batches,
            "samples": samples,
        }
        subject = self._memory_subject(batch)
        with self._engine.guard.reported():
            self._engine.guard.agree(CallKind.MEMORY)
            count = partial(count_memory, type(self), subject)
            return shared_count(count, self.transport, self.weights.held_bytes())

    def _memory_subject(self, batch: dict[str, Any]) -> MemorySubject:
        return MemorySubject(replace(self._arguments, cuts=self.cuts, costs=None), batch, self.replicas)

    def _counted(self, micro_batches: list[Any], samples: Sequence[int]) -> Memory:
        subject = self._memory_subject({"micro_batches": micro_batches, "samples": samples})
        return count_memory(type(self), subject, None)

    # -- forwards alone

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
        outputs: bool = False,
    ) -> Evaluation:
        """Compute a mini-batch's loss, metrics and, if asked for, outputs; no gradients, evaluation mode.

        The pipeline is flushed first. PipelineArguments and errors are those of ``step``.
        """
        user_batch = partial(self._engine.batches.user_batch, inputs, targets, kwargs, micro_batches, samples)
        return self._engine.inference.evaluate(user_batch, outputs=outputs)

    def start_evaluation(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        micro_batches: Iterable[Sequence[Any]] | None = None,
        samples: Sequence[int] | None = None,
    ) -> PendingEvaluation:
        """``evaluate``, of which the result is asked for later: further evaluations and steps follow.

        A worker runs its forwards after its last step, with the weights after that, and may go on before the
        others have. Only asynchronous schemes are flushed first. The first evaluation waits for its result,
        as workers learn the names of its metrics. All workers call it; arguments and errors are those of
        ``step``.
        """
        return self._engine.inference.start_evaluation(
            partial(self._engine.batches.user_batch, inputs, targets, kwargs, micro_batches, samples)
        )

    def predict(self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Outputs of the last layer for the replica's samples, in their order, on every worker.

        No gradients, evaluation mode. Tensors and numbers are put together as ``output_dims`` says. Flushes
        first what is in flight.

        Args:
            inputs: as in ``step``.
            kwargs: as in ``step``.

        Raises:
            ConfigError: the inputs are missing or cannot be cut, or the outputs cannot be put together.
            WorkerError: a worker failed.
        """
        return self._engine.inference.predict(inputs, kwargs)

    def generate(
        self,
        prompt: Tensor | None = None,
        *,
        tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Add tokens to prompts, each chosen of the logits after all before it; for a look at samples.

        The prompt runs once, and then each token alone: layers that look at earlier positions hold a
        ``cf.Carry``, as the built-in GPT's, those of ``hf.layers`` and captured ones do, and keep their keys
        and values. No gradients, evaluation mode. Flushes first what is in flight; all workers call it.

        Args:
            prompt: [samples, positions], int64, as the model's input; read on workers with the first stage.
            tokens: how many are added.
            temperature: divisor of the logits; 0 chooses the most likely token, the default.
            top_k: how many of the most likely tokens are drawn from; None: all.
            seed: of the draws, which do not depend on the schedule.
            end: token after which a sample has ended, and is filled with it; None: there is none.

        Returns:
            The prompt and what was added, [samples, positions + tokens], on the CPU of every worker.

        Raises:
            ConfigError: a number is out of range; the output has no logits; or a layer looks at earlier
                positions without a ``cf.Carry`` that has all it needs, which is seen when the first, second,
                fourth, eighth … and last token after a prompt first runs alone.
            WorkerError: a worker failed.
        """
        sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, end=end)
        return self._engine.inference.generate(prompt, sampling)


PARAMETERS = (*inspect.signature(Pipeline).parameters,)
"""What ``Pipeline`` is given beside options."""
