"""The pipeline: a model, a schedule and an optimiser on the workers of this run.

Invariant: every worker makes the same calls in the same order. The agreements of all workers at the beginning
and the end of a step (samples, shapes, loss, norm) take one small gather each.
"""

from __future__ import annotations

import difflib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Never, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution, Flat, records
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.schedule.ir import Schedule
from counterflow.schedule.recompute_ops import as_recomputed
from counterflow.schedule.registry import schedule_of

from .assembly.defaults import captured_layers, transport_of
from .assembly.local_stages import local_stages, refuse_embeddings
from .assembly.partition import PartitionedModel, partition_model
from .assembly.recordings import Recordings
from .assembly.runners import batches_of, runners_of
from .assembly.weights import weights_of
from .call_guard import CallGuard, TransportUser
from .cut_probe import CutProbe
from .drain import Drain
from .execution.evaluation import PendingEvaluation
from .execution.step import Evaluation, Step, Workers, replica_and_worker
from .generation import Sampling
from .inference import Inference
from .inspection import Inspection, Timelines
from .intake import Intake
from .mesh.parallel import Parallelize, further_mesh, refuse_sharded
from .mesh.rank_mesh import WORKER, Mesh, rank_mesh
from .mesh.weight_table import WeightTable, weight_table
from .messages.compression import Compression
from .mini_batch.losses import LossFunction
from .mini_batch.step_report import CallKind
from .mini_batch.user_batch import UserBatch
from .parameters.compressed_sums import SumCompression, refuse_uncompressed
from .parameters.loss_scale import LossScale
from .parameters.optimizers import MakeOptimizer, MakeScheduler
from .parameters.sharded_updates import refuse_unsharded
from .stages.compiled import CompiledLayers
from .stages.listing import Listing
from .stages.randomness import RandomStreams
from .state_dicts import StateDicts
from .transport.base import Transport
from .transport.worker_watch import raises_worker_error
from .witness.witness import Witness
from .workers.arguments import check_same_arguments
from .workers.lease import Lease, open_lease
from .workers.source_descriptions import loss_details, model_details, versions


class Pipeline:
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
            repeats, and continues for as many steps as are made.
        optimizer: a function of parameters to an optimiser; called once a stage a worker holds, with all
            its parameters, also those that are frozen. Where the model has several optimisers, it is called
            two or three times more with small copies of some, to see that it looks at each for itself.
        scheduler: a function of an optimiser to a learning-rate scheduler, stepped after each update.
        list_layers: the layers of ``model``, if it is neither a sequential nor a list.
        example: in place of ``list_layers``, inputs as ``step`` takes them: the layers of ``model`` are found
            by itself, as ``cf.layers(model, example)`` finds them.
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
        self.execution, self.batching = execution, batching
        schedule = schedule_of(schedule, {})
        if example is not None:
            list_layers, costs = captured_layers(
                model, example, list_layers, costs, self.batching, stages=schedule.stages
            )
        refuse_what_cannot_run(schedule)
        refuse_unsharded(execution, schedule, parallelized=parallelize is not None)
        refuse_uncompressed(execution, schedule, parallelized=parallelize is not None)
        self.transport = transport = transport_of(transport, device, execution.timeout_seconds, schedule)
        self.device = transport.device
        refuse_sharded(model)
        further = further_mesh(mesh, parallelize, transport)
        self._further_dims = further.mesh_dim_names if further is not None else ()
        ranks = rank_mesh(transport.rank, transport.world_size, schedule, mesh)
        self.worker = ranks.coordinates(transport.rank)[WORKER]
        self.streams = RandomStreams(
            execution.seed,
            self.device,
            shared=transport.shares_process,
            timeout_seconds=transport.timeout_seconds,
        )
        its = partition_model(model, loss_function, schedule, list_layers, cuts=cuts, costs=costs)
        self.cuts = its.cuts
        check_same_arguments(
            transport,
            its.schedule,
            {"model": model_details(model), "loss function": loss_details(loss_function)},
            **versions(),
            layers=its.layer_count,
            cuts=its.cuts,
            parallelize=parallelize is not None,
            **execution.agreed(),
            **batching.agreed(),
        )
        its = replace(its, schedule=as_recomputed(its.schedule, execution.recompute))
        self._model, self.schedule = its, its.schedule
        self._held = held = local_stages(
            its,
            model,
            loss_function,
            execution,
            self.streams,
            batching=batching,
            mesh=ranks,
            transport=transport,
            parallelize=parallelize,
            further=further,
        )
        self.stages, self.loss_function = held.stages, held.loss_function
        self.dims = held.dims
        self.ranks: tuple[tuple[int, ...], ...] = self.dims.replica_ranks(transport.rank)
        self.replicas: int = len(self.ranks)
        self.replica: int = replica_and_worker(self.ranks, transport.rank)[0]
        refuse_embeddings(its, execution, self.replicas)
        self._lease: Lease[TransportUser] = open_lease(transport, self)
        name = execution.gradient_compression
        self.gradient_compression = None if name is None else SumCompression(name)
        self.weights = weights_of(
            held.stages,
            names=its.names,
            aliases=its.aliases,
            extra_state=its.extra_state,
            holders=its.holders,
            dims=held.dims,
            transport=transport,
            optimizer=optimizer,
            scheduler=scheduler,
            streams=self.streams,
            sharded=execution.zero_stage > 0,
            compression=self.gradient_compression,
            loss_scale=LossScale.of(execution),
        )
        held.compile(execution.compile, self.streams)
        self.compression = Compression(self.device) if execution.compress else None
        workers = Workers(self.ranks, self.replica, self.worker, transport)
        self._run, self._evaluation = runners_of(
            its, held, execution, workers=workers, weights=self.weights, compression=self.compression
        )
        self._guard = CallGuard(self.worker, transport, self._run, self._lease)
        self._lease.groups = self.weights.groups
        transport.connect(self._run.peers | self._evaluation.peers, self.weights.groups)
        held.leave_others(its, self.ranks[self.replica])
        recordings = Recordings.of(its, held, transport)
        self._batches = batches_of(its, held, execution, batching, dims=self.dims, workers=workers)
        self._witness = Witness(
            model,
            its.layers,
            its.schedule,
            held.stages,
            workers,
            streams=self.streams,
            loss_function=held.loss_function,
            execution=execution,
            sharded=bool(self.dims.further),
        )
        self._drain = Drain(
            self._guard,
            self._run,
            self._evaluation,
            batches=self._batches,
            weights=self.weights,
            owned=held.owned,
            streams=self.streams,
            compares=execution.digest_every > 0,
        )
        self._intake = Intake(
            self._guard,
            its,
            Listing(model, list_layers),
            recordings,
            batches=self._batches,
            runner=self._run,
            drain=self._drain,
            cut_probe=CutProbe(self.schedule, workers, self._evaluation, self._batches.probe),
        )
        self._inference = Inference(
            self._guard,
            self._drain,
            self._intake,
            self._evaluation,
            schedule=self.schedule,
            batches=self._batches,
            stages=held.stages,
            last_holders=len(its.holders[-1]),
            workers=workers,
            owned=held.owned,
            witness=self._witness,
            output_dims=batching.output_dims,
        )
        self._state_dicts = StateDicts(
            self._guard,
            self._drain,
            self.weights,
            self.weights.state,
            streams=self.streams,
            transport=transport,
            order=its.order,
            forget=self._batches.forget,
        )
        self._inspection = Inspection(
            self._guard,
            held.stages,
            held.split,
            interpreter=self._run.interpreter,
            ranks=self.ranks,
            transport=transport,
        )
        self._sealed = True

    def close(self) -> None:
        """End what is in flight and give back what the pipeline holds of its transport; all workers call it.

        A pipeline that is dropped without it gives that back when the next one is made. Also a context
        manager: ``with cf.Pipeline(...) as pipeline: ...``. After a call that failed nothing is left to end.
        """
        if not (self._lease.closed or self._guard.failed):
            self.flush()
            with self._guard.reported():
                self._guard.agree(CallKind.CLOSE)
                self._lease.close()

    def layer_in_use(self, model: PartitionedModel) -> str | None:
        """First layer of ``model`` whose earlier weights the mini-batches in flight need; None: no layer."""
        busy = self._run.in_flight and not self.schedule.synchronous
        return model.layer_in_common(self._model) if busy else None

    def __setattr__(self, name: str, value: object) -> None:
        """Set what a pipeline lets its user set: ``keeps_gradients`` and ``steps``.

        Raises:
            AttributeError: it is an option, which is given when the pipeline is made, or no attribute.
        """
        if self._sealed:
            refuse_setting(self, name, value)
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
        began = time.perf_counter()

        def given() -> UserBatch:
            if outputs and not self.schedule.synchronous:
                raise ConfigError(
                    f"{self.schedule.scheme} ends a mini-batch in later steps, so that a step has no outputs "
                    "of its own; call evaluate(outputs=True) or predict, or take a synchronous scheme"
                )
            self._run.refuse_no_update(update=update)
            return self._batches.user_batch(inputs, targets, kwargs, micro_batches, samples)

        with self._guard.reported():
            with self._held.owned.used(), self.streams.step(), self._held.kept_buffers():
                batch = self._intake.batch(given, CallKind.STEP if update else CallKind.KEEP, outputs=outputs)
                self._witness.find_state(batch)
                if self._witness.due(training=True):
                    self._witness.begin(batch, in_flight=self._run.in_flight)
                self._run.interpreter.saved.counting = self.steps < self.counted_steps
                feeds = batch.feeds
                told = self._run.step(batch, update=update)
                for feed in feeds:
                    feed.wait()
                self._batches.remember(batch)
                of_last = self._inference.outputs(batch) if outputs else None
                self._witness.end(in_flight=self._run.in_flight)
            seconds = time.perf_counter() - began
            if told is None:
                step = Step(self.steps, math.nan, math.nan, batch.total, seconds, None)
            else:
                step = told.step_of(self.steps, seconds)
            if outputs:
                step = replace(step, outputs=of_last)
            self._inspection.log()
            self.steps += 1
            if batch.compared and not self._run.in_flight:  # else with what a later step gathers
                self.weights.check_copies(f"after step {step.number}")
        return step

    def flush(self) -> list[Step]:
        """End what is in flight, so all weights are those after the last step; all workers call it.

        After a step of a synchronous schedule with a barrier nothing is in flight. In an asynchronous scheme
        the next step warms up again.

        Returns:
            Steps whose loss and norm no step has reported.

        Raises:
            WorkerError: a worker failed, or a loss is not finite.
        """
        return self._drain.flush()

    @property
    def steps(self) -> int:
        """Number of steps that were made."""
        return self._guard.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._guard.steps = steps

    @property
    def in_flight(self) -> bool:
        """True if a ``flush`` would have something to do."""
        return self._drain.in_flight

    def settle(self, call: str) -> None:
        """Flush what is in flight, for ``call``; ``flush`` returns the steps later. All workers call it.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._state_dicts.settle(call)

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

        The pipeline is flushed first. Arguments and errors are those of ``step``.
        """
        user_batch = partial(self._batches.user_batch, inputs, targets, kwargs, micro_batches, samples)
        return self._inference.evaluate(user_batch, outputs=outputs)

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
        return self._inference.start_evaluation(
            partial(self._batches.user_batch, inputs, targets, kwargs, micro_batches, samples)
        )

    def predict(self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None) -> Any:
        """What the last layer gives for the replica's samples, in their order, on every worker.

        No gradients, evaluation mode. Tensors and numbers are put together as ``output_dims`` says. Flushes
        first what is in flight.

        Args:
            inputs: as in ``step``.
            kwargs: as in ``step``.

        Raises:
            ConfigError: the inputs are missing or cannot be cut, or the outputs cannot be put together.
            WorkerError: a worker failed.
        """
        return self._inference.predict(inputs, kwargs)

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
        ``cf.Carry``, as the built-in GPT's and those of ``hf.layers`` do, and keep their keys and values. No
        gradients, evaluation mode. Flushes first what is in flight; all workers call it.

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
        return self._inference.generate(prompt, sampling)

    # -- states

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
        self._state_dicts.start_ema(decay)

    def averaged(self) -> AbstractContextManager[None]:
        """Within this context ``evaluate`` and ``predict`` are those of the average; all workers enter it.

        Flushes first what is in flight. This worker's weights are kept once more meanwhile.

        Raises:
            ConfigError: there is no average, or the context is entered twice.
        """
        return self._state_dicts.averaged()

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
        return self._state_dicts.model(rank=rank, local=local, ema=ema)

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
        return self._state_dicts.stream(rank, ema=ema)

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this worker's weights from a whole model's state, or from any part that has all it holds.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        self._state_dicts.load_model(state)

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
        return self._state_dicts.training(rank=rank, local=local)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``state_dict`` returned, or from any part that has all this worker holds.

        Raises:
            ConfigError: a name is missing, or something does not fit; or gradients wait for an update.
        """
        self._state_dicts.load_training(state)

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters from the next step on; all workers call it alike.

        Flushes first what is in flight.

        Args:
            chosen: a parameter's name in the model to whether it is trained.

        Raises:
            ConfigError: gradients wait for an update; or workers that hold a parameter choose differently,
                and then nothing is changed.
        """
        self._state_dicts.set_trainable(chosen)

    # -- what the run shows

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
        return self._inspection.traced()

    def timeline(self, replica: int = 0) -> Timelines:
        """The ops of the last step, or of a trace so far, by worker of a replica; all workers call it.

        Args:
            replica: whose; each worker may ask for another one.

        Returns:
            By worker the ops in their order, with start and end in seconds. Asynchronous schemes count
            micro-batches and versions from the last flush, synchronous ones in each step from 0.
        """
        return self._inspection.timeline(replica)

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

    def explain(self) -> WeightTable:
        """Table of the model's weights, equal on all workers; printing it gives its text.

        For each group of weights: the ranks that hold them, whether these hold the same, shards or other
        experts, over which ranks gradients are summed and by whom, and whose part counts in the norm.
        """
        return weight_table(self.dims, self._further_dims, self._model.names, self._model.holders)

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
        return self._inspection.unsplit

    @property
    def compiled(self) -> dict[int, tuple[CompiledLayers, ...]]:
        """What is compiled as one function in training, by stage of this worker; empty without ``compile``.

        Consecutive layers are one function where nothing is around each of them. Each one that is alone says
        why (``alone``): it draws random numbers, has skips, is computed again by itself, or its stage's
        backward is split. ``graphs`` is 1 where torch's compiler breaks nothing. Known after the first step.
        """
        return self._inspection.compiled

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Optimisers of this worker's stages with trainable weights, by stage."""
        return self.weights.optimizers

    @property
    def keeps_gradients(self) -> bool:
        """True if ``gradients`` are kept."""
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


PARAMETERS = (*inspect.signature(Pipeline).parameters,)
"""What ``Pipeline`` is given beside options."""

SETTABLE = frozenset({"keeps_gradients", "steps"})
"""Attributes that a user may set."""


def refuse_setting(pipeline: Pipeline, name: str, value: object) -> None:
    """Refuse to set an attribute of a pipeline that would change nothing.

    Names that begin with an underscore are the engine's own, methods may be wrapped, and a class derived from
    ``Pipeline`` may have further attributes.

    Raises:
        AttributeError: the attribute is one of those.
    """
    of_class = getattr(type(pipeline), name, None)
    if name in SETTABLE or name.startswith("_") or (callable(of_class) and callable(value)):
        return
    options = dict.fromkeys([*Flat.__annotations__, *PARAMETERS])
    if name in options and name != "options":
        raise AttributeError(
            f"{name} is an option of a pipeline that is made, and setting it would change nothing; give it "
            f"to cf.Pipeline(..., {name}=...)"
        )
    if of_class is not None or name in vars(pipeline):
        raise AttributeError(f"{name} of a pipeline follows from how it was made, and cannot be set")
    if type(pipeline) is Pipeline:
        near = difflib.get_close_matches(name, [*options, *SETTABLE], n=1)
        raise AttributeError(
            f"a pipeline has no attribute {name!r} to set{f'; did you mean {near[0]!r}?' if near else '.'} "
            f"Only {' and '.join(sorted(SETTABLE))} are set, and options are given to cf.Pipeline(...)"
        )
