"""The pipeline: a model, a schedule and an optimiser on the workers of this run.

Invariant: every worker makes the same calls in the same order. What is agreed upon with all other workers
at the begin and the end of a step (samples, shapes, loss, norm) goes through one small gather each.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Never, Self, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow import capture
from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution, Flat, records
from counterflow.program.lowering import lower_evaluation
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.registry import schedule_of

from .calls import Calls
from .execution.interpreter import Interpreter, timelines
from .execution.meters import SavedBytes
from .execution.step import Evaluation, Step, Workers, place
from .making.held import held_stages, refuse_embeddings, sharded
from .making.model import staged
from .making.runner import runner_of
from .mesh.layout import WORKER, Mesh, layout_of
from .mesh.parallel import Parallelize, further_mesh
from .messages.compression import Compression
from .messages.values import Unit
from .mini_batch.agreement import Peers
from .mini_batch.batch import Batch
from .mini_batch.batches import Batches, Role
from .mini_batch.feed import CopyStream, order_of_use
from .mini_batch.given import Given
from .mini_batch.losses import LossFunction
from .mini_batch.samples import joined, moved
from .mini_batch.told import Call, Part, Told
from .parameters.alike import start_alike
from .parameters.optimizers import MakeOptimizer, MakeScheduler
from .parameters.saved import BY_STAGE, ParameterState
from .parameters.sharded_updates import refuse_unsharded
from .parameters.weights import Weights
from .stages.randomness import RandomStreams
from .torch_private import keeps_buffers
from .transport.base import Transport
from .transport.watch import tells_who
from .workers import lease
from .workers.arguments import refuse_others

_LOG = logging.getLogger(__name__)


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
        cuts: the numbers of the layers with which stages 1, 2, ... begin; by default balanced.
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
        seed: of weights on the meta device and of all random draws of the layers.
        execution: how the schedule is executed: recomputation, clipping, precision and so on.
        batching: how mini-batches are cut, if not along their tensors' first dimensions.
        options: fields of ``Execution`` and ``Batching``, in place of the records or beside them.

    Raises:
        ConfigError: the model, the schedule and the workers do not fit together; an option is unknown, not
            legal or given twice; or, in an asynchronous scheme, stages share weights.
        ScheduleError: the checker does not accept the schedule.
        WorkerError: another worker failed.
    """

    @tells_who
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
        cuts: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        mesh: Mesh | None = None,
        parallelize: Parallelize | None = None,
        transport: Transport | str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        execution: Execution | None = None,
        batching: Batching | None = None,
        **options: Unpack[Flat],
    ) -> None:
        execution, batching = records(execution, batching, options, PARAMETERS)
        self.execution, self.batching = execution, batching
        schedule = schedule_of(schedule, {})
        if example is not None:
            list_layers, costs = _found(model, example, list_layers, costs, self.batching)
        refuse_what_cannot_run(schedule)
        refuse_unsharded(execution, schedule, further=parallelize is not None)
        self.transport = transport = _transport(transport, device, execution.timeout_seconds, schedule)
        rank, further = transport.rank, further_mesh(mesh, parallelize, transport)
        layout = layout_of(rank, transport.world_size, schedule, mesh)
        self.worker = layout.place(rank)[WORKER]
        self.device, self.steps = transport.device, 0
        self.streams = RandomStreams(
            seed, self.device, shared=transport.shares_process, timeout_seconds=transport.timeout_seconds
        )
        self._model = its = staged(model, loss_function, schedule, list_layers, cuts=cuts, costs=costs)
        self.schedule, self.cuts = its.schedule, its.cuts
        refuse_others(
            transport,
            its.schedule,
            layers=its.layer_count,
            cuts=its.cuts,
            seed=seed,
            **execution.agreed(),
            **batching.agreed(),
        )
        held = self._held = held_stages(
            its,
            model,
            loss_function,
            execution,
            self.streams,
            worker=self.worker,
            transport=transport,
            shards=parallelize is not None,
        )
        self.stages, self.loss_function = held.stages, held.loss_function
        self._perhaps_unsplit = set(held.split)
        start_alike(held.stages, its.names, its.holders, layout, transport)
        sharding = sharded(
            held,
            its,
            execution,
            layout=layout,
            transport=transport,
            parallelize=parallelize,
            further=further,
        )
        self.layout = sharding.layout
        self.ranks: tuple[tuple[int, ...], ...] = self.layout.grid(rank)
        self.replicas: int = len(self.ranks)
        self.replica: int = place(self.ranks, rank)[0]
        refuse_embeddings(its, execution, self.replicas)
        self._lease = lease.opened(transport, self)
        self.weights = Weights(
            held.stages,
            names=its.names,
            aliases=its.aliases,
            unlisted=its.unlisted,
            holders=its.holders,
            sharding=sharding,
            transport=transport,
            optimizer=optimizer,
            scheduler=scheduler,
            named=execution.named_parameters,
            streams=self.streams,
            sharded=execution.zero_stage > 0,
        )
        held.compile(execution.compile, self.streams)
        self.compression = Compression(self.device) if execution.compress else None
        constant = [t for s in held.stages.values() for x in s.with_weights for t in _tensors(x.module)]
        make = partial(
            Interpreter,
            worker=self.worker,
            ranks=self.ranks[self.replica],
            transport=transport,
            stages=held.stages,
            loss_function=self.loss_function,
            compression=self.compression,
            saved=SavedBytes(constant),
        )
        workers = Workers(self.ranks, self.replica, self.worker, transport)
        self._run = runner_of(
            its.schedule, execution, make, workers=workers, weights=self.weights, statistics=its.statistics
        )
        forwards = lower_evaluation(its.schedule, matching=transport.matching)
        self._evaluation: Interpreter = make(forwards.schedule)
        self._evaluation_tasks = self._evaluation.prepare(forwards, {})
        self._calls = Calls(self.worker, transport, self._run, self._lease)
        self._connect()
        self._batches = self._made_batches()
        self._untold: list[Step] = []

    # -- making

    def _connect(self) -> None:
        """To those whom messages go to or come from, and who holds the same weights."""
        self._lease.groups = self.weights.groups
        every = (*self._run.lists, self._evaluation_tasks)
        peers = {peer for tasks in every for peer in tasks.peers}
        self.transport.connect(peers, self.weights.groups)
        self._held.leave_others(self._model, self.ranks[self.replica])

    def _made_batches(self) -> Batches:
        """What makes this worker's mini-batches."""
        rank, layout = self.transport.rank, self.layout
        role = Role(
            worker=self.worker,
            takes_inputs=0 in self.stages,
            takes_targets=self.schedule.stages - 1 in self.stages,
            loss_apart=self.loss_function is not None,
            tells_loss=layout.is_first(rank, set(layout.further) - layout.split),
            split=bool(layout.split),
            further=bool(layout.further),
        )
        peers = Peers(layout.alike, self.replica, self.transport)
        copies = CopyStream(self.device, order_of_use(self.schedule, self.worker))
        return Batches(self.schedule, self.execution, self.batching, role=role, peers=peers, copies=copies)

    def close(self) -> None:
        """End what is in flight and give back what the pipeline holds of its transport; all workers call it.

        A pipeline that is dropped without it gives that back when the next one is made. Also a context
        manager: ``with cf.Pipeline(...) as pipeline: ...``.
        """
        if not self._lease.closed:
            self.flush()
            with self._reported():
                self._lease.close()

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

    # -- a step

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

        With ``update=False`` its gradients are kept: the next update is made with those of the mean loss over
        all samples since the one before, and ``grad_norm`` is told then.

        Where there are fewer samples than micro-batches, the last of these have none and run as nothing.

        In asynchronous schemes, a step begins its mini-batch and leaves part of it to the next steps, or to
        ``flush``; until then all mini-batches have the same shapes. So they have without a barrier.

        Args:
            inputs: a tensor, or tensors in any structure, with the samples in ``input_dims``; read on workers
                with the first stage. Numbers, texts and None in it go to all micro-batches.
            targets: likewise, in ``target_dims``; read on workers with the last stage.
            kwargs: keyword arguments to the first layer, cut like the inputs, in ``kwarg_dims``.
            micro_batches: in place of all these, (inputs, targets) or (inputs, targets, kwargs) of each
                micro-batch, as many as the schedule has; lengths may differ. Of an iterator, the next ones.
            samples: of each of these, which weighs its loss; needed where no dimension tells them. With
                ``input_dims=None`` the targets tell them, and with ``target_dims=None`` the inputs; with
                both, each micro-batch counts as one.
            update: whether the weights are updated; False only in synchronous schemes.
            outputs: whether ``Step.outputs`` are wanted; in synchronous schemes.

        Raises:
            ConfigError: the mini-batch has no samples, or is missing; or its tensors have different numbers
                of samples.
            WorkerError: a worker failed, or the loss or a gradient is not finite.
        """
        began = time.perf_counter()
        with self._reported(), self._held.owned.used(), self.streams.step(), self._kept_buffers():
            if outputs and not self.schedule.synchronous:
                raise ConfigError(
                    f"{self.schedule.scheme} ends a mini-batch in later steps, so that a step has no outputs "
                    "of its own; call evaluate(outputs=True) or predict, or take a synchronous scheme"
                )
            given = self._batches.given(inputs, targets, kwargs, micro_batches, samples)
            batch = self._batch(given, Call.STEP if update else Call.KEEP, outputs=outputs)
            interpreter = self._run.interpreter
            interpreter.in_flight.counting = self.steps < self.counted_steps
            feeds = [feed for feed in (batch.inputs, batch.targets) if feed is not None]
            told = self._run.step(batch, update=update)
            for feed in feeds:
                feed.wait()
            self._batches.remember(batch)
            of_last = self._outputs(batch) if outputs else None
        seconds = time.perf_counter() - began
        if told is None:
            step = Step(self.steps, math.nan, math.nan, batch.total, seconds, None)
        else:
            step = told.step_of(self.steps, seconds)
        if outputs:
            step = replace(step, outputs=of_last)
        if self._perhaps_unsplit:
            self._tell_unsplit()
        self.steps += 1
        if (
            batch.compared and not self._run.in_flight
        ):  # else they are compared with what a later step gathers
            self.weights.check_copies(f"after step {step.number}")
        return step

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
        self._untold = self.flush()
        with self._reported(), self._held.owned.used(), ExitStack() as evaluating:
            given = self._batches.given(inputs, targets, kwargs, micro_batches, samples)
            batch = self._batch(given, Call.EVALUATE, outputs=outputs)
            for stage in self.stages.values():
                evaluating.enter_context(stage.evaluating())
            self._evaluation.run(self._evaluation_tasks, batch)
            self._batches.remember(batch)
            parts = list(map(Part.unpack, self.transport.gather(batch.losses.part().pack())))
            workers, weighed = self._run.workers, [part.weighed for part in parts]
            scale = 1 / workers.weight(weighed, self.steps)[0]
            metrics = workers.metrics(weighed, batch.losses, scale)
            of_last = self._outputs(batch) if outputs else None
        return Evaluation(scale * math.fsum(part.loss for part in parts), metrics, of_last)

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
        self._untold = self.flush()
        with self._reported(), self._held.owned.used(), torch.no_grad(), ExitStack() as evaluating:
            batch = self._batch(self._batches.given(inputs, None, kwargs), Call.PREDICT, outputs=True)
            batch.has_loss = False
            for stage in self.stages.values():
                evaluating.enter_context(stage.evaluating())
            self._evaluation.run(self._evaluation_tasks, batch)
            self._batches.remember(batch)
            return self._outputs(batch, everywhere=True)

    def _outputs(self, batch: Batch, *, everywhere: bool = False) -> Any:
        """The replica's outputs in the samples' order, on workers with the last stage or on all."""
        last = self.schedule.stages - 1
        by_unit = cast("dict[Unit, Any]", batch.outputs)
        if everywhere or len(self._model.holders[last]) > 1:
            mine = moved(by_unit, torch.device("cpu"))
            rows = cast("list[dict[Unit, Any]]", self.transport.gather_objects(mine))
            ours = [rows[rank] for rank in self.ranks[self.replica]]
            by_unit = {unit: output for outputs in ours for unit, output in outputs.items()}
        if not everywhere and last not in self.stages:
            return None
        units, sizes = sorted(by_unit), batch.samples
        counts = [rows.stop - rows.start for rows in (unit.rows(sizes[unit.micro_batch]) for unit in units)]
        found = joined([by_unit[unit] for unit in units], self.batching.output_dims, "outputs", counts)
        return moved(found, self.device)

    def flush(self) -> list[Step]:
        """End what is in flight, so that all weights are as after the last step; all workers call it.

        After a step of a synchronous schedule nothing is, if it has a barrier. If asynchronous the next step
        warms up again.

        Returns:
            The steps whose loss and norm no step has told.

        Raises:
            WorkerError: a worker failed, or a loss is not finite.
        """
        self._calls.only_taken()
        untold, self._untold = self._untold, []
        if not self._run.in_flight:
            return untold
        began = time.perf_counter()
        with self._reported(), self._held.owned.used(), self.streams.step():
            told = Told(Call.FLUSH, self.steps, follows=True)
            found = self._run.flush(told, partial(self._batches.compare, told))
        seconds = time.perf_counter() - began
        untold += [each.step_of(each.step, seconds / len(found)) for each in found]
        if self.execution.digest_every:
            self.weights.check_copies(f"after step {self.steps - 1}")
        return untold

    @property
    def in_flight(self) -> bool:
        """Whether a ``flush`` would have something to do."""
        return self._run.in_flight

    def _batch(self, given: Given, call: Call, *, outputs: bool = False) -> Batch:
        self._calls.only_alone()
        if call.trains:
            self._calls.only_own("step")
        return self._batches.made(given, call, self.steps, self._run, outputs=outputs)

    # -- looking at it

    @property
    def whole_timeline(self) -> bool:
        """Whether ``timeline`` has all since the pipeline was empty, and not only the last step."""
        return self._run.interpreter.whole_timeline

    @whole_timeline.setter
    def whole_timeline(self, whole: bool) -> None:
        self._run.interpreter.whole_timeline = whole

    def timeline(self, replica: int = 0) -> list[list[tuple[Op, float, float]]]:
        """The ops of the last step as they ran, by worker of a replica; all workers call it.

        Args:
            replica: whose; each worker may ask for another one.

        Returns:
            By worker the ops in their order, with start and end in seconds. Those of asynchronous schemes
            count micro-batches and versions from the last flush.
        """
        return timelines(self.transport, self._run.interpreter, self.ranks[replica])

    @property
    def warm_up_steps(self) -> int:
        """Steps from an empty pipeline until all steps are alike; 0 in synchronous schemes."""
        return self._run.warm_up_steps

    @property
    def counted_steps(self) -> int:
        """First steps in which bytes are counted: as asked for, and those until all periods are alike."""
        return self.execution.count_memory_steps + self._run.warm_up_steps

    @property
    def peak_saved_bytes(self) -> int:
        """Most bytes that autograd kept for backward on this worker at once, in the steps counted."""
        saved = self._run.interpreter.saved
        assert saved is not None
        return saved.peak

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

    def _kept_buffers(self) -> AbstractContextManager[object]:
        """Around a step: split backwards go twice through functions that the user compiled."""
        return keeps_buffers() if self._held.split else nullcontext()

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
    def optimizers(self) -> Mapping[int, Optimizer]:
        """By stage of this worker that has weights to train: its optimiser."""
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
            self.weights.follow(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context ``evaluate`` and ``predict`` are those of the average; all workers enter it.

        Flushes first what is in flight. This worker's weights are kept once more meanwhile.

        Raises:
            ConfigError: there is no average, or the context is entered twice.
        """
        self._calls.only_own("averaged()")
        self._untold = self.flush()
        with ExitStack() as shown:
            with self._reported():
                shown.enter_context(self.weights.averaged())
            self._calls.shows_average = True
            try:
                yield
            finally:
                self._calls.shows_average = False

    def model_state_dict(
        self, *, rank: int | None = None, local: bool = False, ema: bool = False
    ) -> dict[str, Any]:
        """The model's parameters, buffers and extra state by its own names, on the CPU; all workers call it.

        Flushes first what is in flight. Tensors go one by one from who holds them to who gets them. Where the
        whole model is too large for any worker, each keeps what it holds (``local=True``), or one takes it
        tensor by tensor (``stream_weights``).

        Args:
            rank: the only one that gets the model; the others get an empty dict. None: all get it.
            local: only what this worker holds, without asking the others.
            ema: whether trained weights are their averages, in the weights' precision.

        Raises:
            ConfigError: there is no such rank, or no average.
            WorkerError: the copies of a stage differ.
        """
        if local:
            self._calls.only_when_empty("model_state_dict(local=True)")
            with self.weights.averaged() if ema else nullcontext():
                return self.weights.saved.state_dict()
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
        self._calls.only_own("the state")
        self._untold = self.flush()
        self.weights.check_copies(f"after {self.steps} steps")
        return self._averages(rank) if ema else self.weights.saved.stream(rank)

    def _averages(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        with self.weights.averaged():
            yield from self.weights.saved.stream(rank)

    def _taking(self, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same to its end, also for who stops in the midst."""
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
        self._calls.only_when_empty("load_model_state_dict")
        self.weights.saved.load_state_dict(state)

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
            by stage (as text), its state; ``step`` and ``seed``, from which all random draws come.

        Raises:
            ConfigError: gradients wait for an update, ``local`` while mini-batches are in flight, or there is
                no such rank.
            WorkerError: the copies of a stage differ.
        """
        self._calls.only_updated("state_dict")
        model = self.model_state_dict(rank=rank, local=local)
        with self._reported():
            rest = (
                self.weights.saved.training_state()
                if local
                else self.weights.saved.whole_training_state(rank)
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
        self._calls.only_updated("load_state_dict")
        if missing := [
            name for name in ("model", "optimizer", "scheduler", "step", "seed") if name not in state
        ]:
            raise ConfigError(
                f"the state has no {missing[0]!r}: load_state_dict resumes from what state_dict() returned; "
                "a model's weights alone are loaded by load_model_state_dict"
            )
        self.load_model_state_dict(state["model"])
        stages = {kind: _with_keys(int, state[kind]) for kind in BY_STAGE if kind in state}
        self.weights.saved.load_training_state({**state, **stages})
        self.steps, self.streams.seed = state["step"], state["seed"]

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters from the next step on; all workers call it alike.

        Flushes first what is in flight.

        Args:
            chosen: a parameter's name in the model to whether it is trained.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._calls.only_updated("set_trainable")
        self._untold = self.flush()
        self.weights.set_trainable(chosen)
        self._batches.forget()

    def settle(self, call: str) -> None:
        """Flush what is in flight, for ``call``; ``flush`` tells of it later. All workers call it.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._calls.only_updated(call)
        self._untold = self.flush()

    def _reported(self) -> AbstractContextManager[None]:
        """Within it the other workers are told of an error."""
        return self._calls.reported(self.steps)


PARAMETERS = (*inspect.signature(Pipeline).parameters,)
"""What ``Pipeline`` is given beside options."""


def _transport(
    given: Transport | str | None,
    device: torch.device | str | None,
    timeout_seconds: float | None,
    schedule: Schedule,
) -> Transport:
    if isinstance(given, Transport):
        return given
    from .workers.world import current_transport  # noqa: PLC0415

    alone = schedule.placement.workers == 1
    return current_transport(given, device=device, timeout_seconds=timeout_seconds, alone=alone)


def _with_keys(kind: Callable[[Any], Any], by_stage: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same with keys of a kind: ``torch.distributed.checkpoint`` knows texts alone."""
    return {kind(stage): value for stage, value in by_stage.items()}


def _found(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None,
    costs: Sequence[float] | None,
    batching: Batching,
) -> tuple[Callable[[nn.Module], Sequence[nn.Module]], Sequence[float]]:
    """What lists the layers that are found by itself, and their costs.

    Raises:
        ConfigError: they cannot be found, or somebody lists them.
    """
    if list_layers is not None:
        raise ConfigError(
            "list_layers says what the layers are, and example asks for them to be found; give one of them"
        )
    dims = batching.input_dims
    if dims is not None and not isinstance(dims, int):
        raise ConfigError(
            f"example: layers are found where the samples are in one dimension of all inputs, and input_dims "
            f"is {dims!r}; call cf.layers with what fits, and give its layers by list_layers"
        )
    layers = capture.layers(cast("nn.Module", model), example, input_dims=dims)
    return lambda _: layers, [layer.cost for layer in layers] if costs is None else costs


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
