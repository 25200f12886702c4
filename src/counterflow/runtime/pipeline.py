"""The pipeline: a model, a schedule and an optimiser on the workers of this run.

Invariant: every worker makes the same calls in the same order. What is agreed upon with all other workers
at the begin and the end of a step (samples, shapes, loss, norm) goes through one small gather each.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Never, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from counterflow.errors import ConfigError, CounterflowError
from counterflow.program.actions import Matching, Program
from counterflow.program.check import checked_program
from counterflow.program.lowering import OpTimes, Shared, lower_evaluation
from counterflow.program.runnable import refuse_what_cannot_run
from counterflow.program.segments import segments
from counterflow.schedule.cuts import balance, explicit
from counterflow.schedule.ir import Op, Schedule
from counterflow.schedule.modes import Recompute, Sync, parse_mode

from .execution.asynchronous import AsynchronousRunner
from .execution.interpreter import Interpreter
from .execution.meters import SavedBytes
from .execution.step import Step, StepStatistics, Workers, place
from .execution.synchronous import SynchronousRunner
from .execution.without_barrier import BarrierFreeRunner, waits_for_norm
from .mesh.layout import WORKER, Layout, Mesh, layout_of
from .mesh.parallel import Parallelize, StageModule, further_mesh, parallelized
from .mesh.sharding import Sharding
from .messages.compression import Compression
from .messages.values import Unit
from .mini_batch.batch import Batch, Shapes, rows_of
from .mini_batch.counted import Means
from .mini_batch.entries import Settled
from .mini_batch.feed import CopyStream, Feed
from .mini_batch.given import NOT_GIVEN, Agreed, Given, even, ready, whole
from .mini_batch.loss_check import LossCheck, LossChecks
from .mini_batch.losses import Losses, LossFunction
from .mini_batch.samples import Dims, joined, moved
from .parameters.alike import start_alike
from .parameters.names import shared_names
from .parameters.optimizers import MakeOptimizer, MakeScheduler
from .parameters.sharded_updates import refuse_unsharded
from .parameters.unlisted import Unlisted
from .parameters.weights import Weights
from .stages.deferred import defer
from .stages.embeddings import Setting
from .stages.estimates import estimated_costs
from .stages.layers import aliases_of, layers_of, state_names
from .stages.ownership import Owned
from .stages.precision import Autocast, Cast, Precision, refuse_scaled
from .stages.randomness import RandomStreams
from .stages.remote import refuse_remote
from .stages.skips import links_of, stage_skips
from .stages.stage import (
    LOSS,
    NamedLayer,
    StageCopy,
    have_statistics,
    loss_layer,
    materialised,
    place_of,
)
from .torch_private import keeps_buffers
from .transport.base import Gathering, Transport
from .transport.turns import elsewhere, my_worker
from .workers import lease
from .workers.arguments import refuse_others
from .workers.watch import tells_who, worker_error

_LOG = logging.getLogger(__name__)
_NAMES = "inputs", "targets"
_KINDS = 256
"""The shapes of so many kinds of mini-batches are known at once."""


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
        schedule: a schedule that the checker accepts. One without a flush needs enough periods to show
            what repeats, and goes on for as many steps as are made.
        optimizer: a function of parameters to an optimiser; called once a stage a worker holds, with all
            its parameters, also those that are frozen. Where the model has several optimisers, it is called
            two or three times more with small copies of some, to see that it looks at each for itself.
        scheduler: a function of an optimiser to a learning-rate scheduler, stepped after each update.
        named_parameters: whether ``optimizer`` takes a list of (name, parameter), with the model's own names,
            as ``model.named_parameters()`` gives them and torch's optimisers take them.
        list_layers: the layers of ``model``, if it is neither a sequential nor a list.
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
        recompute: ``none``, ``stage`` or ``layer``: what a backward computes again to save memory.
        sync: ``end``, ``eager`` or ``eager-opt``: when gradients of a stage's copies are summed.
        op_times: start and end of every op by which ``eager-opt`` decides: ``Simulation.op_times`` of the
            schedule with this model's costs; by default of forwards that take 1 and backwards that take 2.
        clip_norm: gradients of a larger global norm are scaled down to it; None: never. Without a flush
            each stage by its own norm, to ``clip_norm / sqrt(stages)``.
        skip_non_finite: whether a mini-batch with a loss or a gradient that is not finite updates nothing on
            any worker, and ``Step.skipped`` says so; else it is an error. For schemes with a flush.
        barrier: whether each step of a synchronous schedule ends on all workers before the next one begins.
            Without, a worker goes on as soon as its own stages are updated. Numbers are the same, bit for
            bit; a later step tells loss and norm (``Step.about``), and ``flush`` ends what is under way.
            With ``clip_norm`` or ``skip_non_finite`` updates still wait for the norm of all stages.
        zero_stage: 1: of all workers that hold a weight (copies of its stage, replicas) one alone has its
            optimiser state, updates it and sends it to the others when a step ends (ZeRO stage 1). Numbers
            are the same, bit for bit; each worker's optimiser is made of the weights it updates. 0: all
            update all they hold. For schemes with a flush, with a barrier, without ``parallelize``, and for
            optimisers that look at each parameter for itself.
        autocast: a dtype (``torch.bfloat16``) in which layers run where torch deems it safe. A weight is cast
            once for each version, not for each micro-batch.
        compute_dtype: a dtype (``torch.bfloat16``) in which all weights of layers are while these run, and
            the model's input; its output is float32 again. The parameters stay as they are: gradients are
            added, updates made and states saved in their precision (master weights).
        compile_layers: whether layers go through ``torch.compile``; or the name of its backend.
        deferred_batch_norm: whether running statistics of batch norms are updated once a step, by the mean
            and variance of the whole mini-batch over all micro-batches, copies and replicas, and not by each
            micro-batch's in turn. Each micro-batch is normalised by its own. For schemes with a flush.
        compress: whether activations and gradients go between workers in half precision where that loses
            little (WPipe, appendix A.3); the first step's never do.
        input_dims: which dimension of the inputs' tensors the samples are: an int for all of them, None for
            none (all micro-batches get them whole), ``cf.ENTRIES`` for the entries of a list, or a tree of
            these of the inputs' structure or of its first levels, as ``torch.vmap`` takes ``in_dims``.
        target_dims: likewise of the targets.
        kwarg_dims: likewise of keyword arguments to the first layer.
        output_dims: likewise of what the last layer gives, where outputs are asked for.
        dynamic_shapes: whether shapes between stages may differ for inputs of the same shapes.
        per_micro_batch_loss: whether the loss is meant for each micro-batch alone, and the mean of these by
            samples is trained. Else, in the first mini-batch of each kind, a loss that is no mean over
            samples, and no ``LossSum``, is refused.
        digest_every: steps after which the copies of the stages are compared, and the mini-batches that the
            workers of a replica are given; 0: never. Threads' mini-batches always are. Without a barrier or a
            flush a later step tells of copies that differ; without a flush only ``flush`` compares buffers.
        count_memory_steps: first steps in which the bytes saved for backward are counted.
        timeout_seconds: how long another worker is waited for; by default as at the launch, or 300.

    Raises:
        ConfigError: the model, the schedule and the workers do not fit together; or, without a flush,
            stages share weights.
        ScheduleError: the checker does not accept the schedule.
        WorkerError: another worker failed.
    """

    _taken = True
    """Whether all that ``stream_weights`` gives here was taken."""

    _shows_average = False
    """Whether the weights are their averages now."""

    @tells_who
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_function: LossFunction | None,
        schedule: Schedule,
        *,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        named_parameters: bool = False,
        list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        cuts: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
        mesh: Mesh | None = None,
        parallelize: Parallelize | None = None,
        transport: Transport | str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        recompute: Recompute | str = Recompute.NONE,
        sync: Sync | str = Sync.EAGER_OPT,
        op_times: OpTimes | None = None,
        clip_norm: float | None = None,
        skip_non_finite: bool = False,
        barrier: bool = True,
        zero_stage: int = 0,
        autocast: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        compile_layers: bool | str = False,
        deferred_batch_norm: bool = False,
        compress: bool = False,
        input_dims: Dims = 0,
        target_dims: Dims = 0,
        kwarg_dims: Dims = 0,
        output_dims: Dims = 0,
        dynamic_shapes: bool = False,
        per_micro_batch_loss: bool = False,
        digest_every: int = 100,
        count_memory_steps: int = 2,
        timeout_seconds: float | None = None,
    ) -> None:
        self.schedule = schedule
        self._refuse_what_cannot_run(zero_stage, barrier=barrier, further=parallelize is not None)
        self.transport = _transport(transport, device, timeout_seconds, schedule)
        rank, further = self.transport.rank, further_mesh(mesh, parallelize, self.transport)
        layout = layout_of(rank, self.transport.world_size, schedule, mesh)
        self.worker, self._thread = layout.place(rank)[WORKER], my_worker()
        self._parts = max(op.parts for op in schedule.ops())
        self.device = self.transport.device
        self.digest_every = digest_every
        self.count_memory_steps = count_memory_steps
        self.dynamic_shapes = dynamic_shapes
        self.input_dims, self.target_dims = input_dims, target_dims
        self.kwarg_dims, self.output_dims = kwarg_dims, output_dims
        self._loss_checks = None if per_micro_batch_loss else LossChecks(output_dims, target_dims)
        self.steps = 0
        recompute = parse_mode(Recompute, "recompute", recompute)
        sync = self._when_summed(parse_mode(Sync, "sync", sync))
        self.streams = streams = RandomStreams(
            seed,
            self.device,
            shared=self.transport.shares_process,
            timeout_seconds=self.transport.timeout_seconds,
        )
        self.loss_function = loss_function
        precision = self._precision(autocast, compute_dtype, parallelize, compile_layers)
        self.compression = Compression(self.device) if compress else None
        self._loss = loss_layer(loss_function)
        self._read_layers(model, list_layers, cuts, costs)
        schedule = self.schedule
        refuse_others(
            self.transport,
            schedule,
            layers=sum(map(len, self._layers_of)),
            cuts=self.cuts,
            seed=seed,
            sync=sync.value,
            clip_norm=clip_norm,
            skip_non_finite=skip_non_finite,
            barrier=barrier,
            autocast=autocast,
            compute_dtype=compute_dtype,
            deferred_batch_norm=deferred_batch_norm,
            compress=compress,
            dynamic_shapes=dynamic_shapes,
            per_micro_batch_loss=per_micro_batch_loss,
            digest_every=digest_every,
        )
        self.stages = self._make_stages(model, streams, recompute, precision, defers=deferred_batch_norm)
        self._note_split_stages()
        self._holders = [Program(schedule, ()).holders(stage) for stage in range(schedule.stages)]
        start_alike(self.stages, self._names, self._holders, layout, self.transport)
        sharding = self._sharding(parallelize, further, layout, clip_norm)
        self._refuse_embeddings(compute_dtype)
        self._lease = lease.opened(self.transport, self)
        self.weights = Weights(
            self.stages,
            names=self._names,
            aliases=aliases_of(model),
            unlisted=self._unlisted,
            holders=self._holders,
            sharding=sharding,
            transport=self.transport,
            optimizer=optimizer,
            scheduler=scheduler,
            named=named_parameters,
            streams=streams,
            sharded=zero_stage > 0,
        )
        self._compile(compile_layers)
        constant = [t for s in self.stages.values() for x in s.with_weights for t in _tensors(x.module)]
        make = partial(
            Interpreter,
            worker=self.worker,
            ranks=self.ranks[self.replica],
            transport=self.transport,
            stages=self.stages,
            loss_function=self.loss_function,
            compression=self.compression,
            saved=SavedBytes(constant),
        )
        self._run = self._runner(make, sync, op_times, clip_norm, skip_non_finite, barrier=barrier)
        forwards = lower_evaluation(schedule, matching=self.transport.matching)
        self._evaluation: Interpreter = make(forwards.schedule, owner=self._run)
        self._evaluation_tasks = self._evaluation.prepare(forwards)
        self._connect()
        self._shapes: dict[int, Shapes] = {}
        self._agreed = Agreed()
        """Of the last mini-batch."""
        self._untold: list[Step] = []
        self.metrics: dict[str, float] = {}
        """Of the last ``evaluate``."""
        self.outputs: Any = None
        """Of the last ``evaluate(outputs=True)``: as ``Step.outputs``."""

    # -- making

    def _when_summed(self, asked: Sync) -> Sync:
        """A worker that a sum holds does not make what others need for it: then sums are the last thing."""
        return Sync.END if self.transport.launches_hold else asked

    def _refuse_what_cannot_run(self, zero_stage: int, *, barrier: bool, further: bool) -> None:
        refuse_what_cannot_run(self.schedule)
        refuse_unsharded(zero_stage, self.schedule, barrier=barrier, further=further)

    def _runner(
        self,
        make: Callable[..., Interpreter],
        sync: Sync,
        op_times: OpTimes | None,
        clip_norm: float | None,
        skips: bool,
        *,
        barrier: bool,
    ) -> SynchronousRunner | AsynchronousRunner:
        """What runs the schedule, with its lists as they are proved."""
        workers = Workers(self.ranks, self.replica, self.worker, self.transport)
        matching, shared = self.transport.matching, Shared(self.weights.ties, self._statistics)
        if not self.schedule.synchronous:
            if skips:
                raise ConfigError(
                    f"{self.schedule.scheme} updates each stage before all gradients are known, so that "
                    "skip_non_finite cannot skip an update everywhere; take a scheme with a flush"
                )
            cut = segments(self.schedule, replicas=self.replicas, matching=matching, shared=shared)
            return AsynchronousRunner(cut, make, workers, self.weights, clip_norm)
        program = checked_program(
            self.schedule,
            replicas=self.replicas,
            sync=sync,
            times=op_times,
            matching=matching,
            shared=shared,
            norm=barrier or waits_for_norm(clip_norm, skips=skips),
        )
        kind = SynchronousRunner if barrier else BarrierFreeRunner
        return kind(program, make, workers, self.weights, clip_norm, skips=skips)

    def _read_layers(
        self,
        model: nn.Module | Sequence[nn.Module],
        list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None,
        cuts: Sequence[int] | None,
        costs: Sequence[float] | None,
    ) -> None:
        modules = layers_of(model, list_layers)
        names_of = state_names(model, list_layers)
        self.layers = [NamedLayer(i, n, m) for i, (n, m) in enumerate(zip(names_of, modules, strict=True))]
        stages = self.schedule.stages
        if cuts is not None:
            found = explicit(cuts, len(modules), stages)
        else:
            found = balance(estimated_costs(modules) if costs is None else list(costs), stages)
        self.cuts = tuple(found)
        edges = (0, *self.cuts, len(modules))
        self._layers_of = [self.layers[edges[s] : edges[s + 1]] for s in range(stages)]
        self.skips = stage_skips(modules, edges)
        """By stage of the model: what it saves for others and loads of them; None: nothing."""
        self.schedule = self.schedule.with_skips(links_of(self.skips))
        self._statistics = tuple(s for s, layers in enumerate(self._layers_of) if have_statistics(layers))
        self._read_names(model)

    def _read_names(self, model: nn.Module | Sequence[nn.Module]) -> None:
        self._unlisted = Unlisted(model, [layer.names for layer in self.layers])
        self._order = list(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else []
        first: dict[int, str] = {}
        self._names: list[list[tuple[str, str]]] = []  # by stage: (name, name of the first that shares it)
        for stage, layers in enumerate(self._layers_of):
            names = []
            last = stage == self.schedule.stages - 1
            for layer in (*layers, self._loss) if last and self._loss is not None else layers:
                for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                    full = layer.names[name]
                    names.append((full, first.setdefault(id(parameter), full)))
            self._names.append(names)

    def _precision(
        self,
        autocast: torch.dtype | None,
        compute_dtype: torch.dtype | None,
        parallelize: Parallelize | None,
        compile_layers: bool | str,
    ) -> Callable[[StageCopy], Precision]:
        """Makes the precision in which a stage's layers run."""
        refuse_scaled("autocast", autocast)
        refuse_scaled("compute_dtype", compute_dtype)
        if compute_dtype is None:
            if autocast is None:
                return lambda _: Precision()
            keeps = parallelize is None
            return lambda copy: Autocast(self.device, autocast, copy.parameters(), keeps=keeps)
        for given, name, instead in (
            (autocast, "autocast", "leave one of them away"),
            (parallelize, "parallelize", "give fully_shard a MixedPrecisionPolicy"),
            (compile_layers, "compile_layers", "take autocast"),
        ):
            if given:
                raise ConfigError(
                    f"compute_dtype replaces weights while layers run; {name} does not go with it: {instead}"
                )
        return lambda copy: Cast([x.module for x in copy.layers], compute_dtype, partial(_version_of, copy))

    def _make_stages(
        self,
        model: nn.Module | Sequence[nn.Module],
        streams: RandomStreams,
        recompute: Recompute,
        precision: Callable[[StageCopy], Precision],
        *,
        defers: bool,
    ) -> dict[int, StageCopy]:
        held = sorted({stage for _, stage in self.schedule.placement.held(self.worker)})
        given = [layer for stage in held for layer in self._layers_of[stage]]
        last = self.schedule.stages - 1
        if self._loss is not None and last in held:
            given.append(self._loss)
        if defers and not self.schedule.synchronous:
            raise ConfigError(
                f"deferred_batch_norm: {self.schedule.scheme} begins a mini-batch before the one before has "
                "ended, so that both would be in one sum; leave it away, or take a scheme with a flush"
            )
        for layer in given:
            refuse_remote(layer.index, layer.module)
        users = [(place_of(layer), layer.module) for layer in given]
        self._owned = Owned(users, self._modules_of(model), self.transport)
        trained = zip(given, self._owned.modules, strict=True)
        made = materialised([replace(layer, module=its) for layer, its in trained], self.device, streams)
        self._owned.remade()
        if defers:
            defer(layer.module for layer in made)
        by_index = {layer.index: layer for layer in made}
        loss = by_index.get(LOSS)
        if loss is not None:
            self.loss_function = loss.module
        for layers in self._layers_of:  # the rest of the model is not this worker's
            for layer in layers:
                by_index.setdefault(layer.index, layer)
        self.layers = []
        return {
            stage: StageCopy(
                stage,
                [by_index[layer.index] for layer in self._layers_of[stage]],
                streams,
                recompute,
                loss=loss if stage == last else None,
                last=stage == last,
                precision=precision,
                skips=self.skips[stage],
                means=self._means(stage == last),
            )
            for stage in held
        }

    def _modules_of(self, model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
        """All modules of the user's: of the model, of layers that wrap parts of it, and of the loss."""
        roots = [layer.module for layers in self._layers_of for layer in layers]
        roots += [model] if isinstance(model, nn.Module) else []
        roots += [] if self._loss is None else [self._loss.module]
        return list({id(module): module for root in roots for module in root.modules()}.values())

    def _leave_others(self) -> None:
        """Let the user's model have no numbers of what lives elsewhere."""
        ranks = self.ranks[self.replica]
        self._owned.leave(
            (place_of(layer), layer.module, [ranks[worker] for worker in self._holders[stage]])
            for stage, layers in enumerate(self._layers_of)
            if stage not in self.stages
            for layer in layers
        )

    def _means(self, last: bool) -> Means | None:
        """What watches the stage's loss; without a flush weights change before all that counts is known."""
        if not last or not self.schedule.synchronous:
            return None
        return Means(in_layer=None if self.loss_function is not None else self._layers_of[-1][-1].index)

    def _sharding(
        self,
        parallelize: Parallelize | None,
        further: DeviceMesh | None,
        layout: Layout,
        clip_norm: float | None,
    ) -> Sharding:
        """Let the user shard the weights of this worker's stages; who gets what samples follows from it."""
        sharding = Sharding(layout)
        if parallelize is not None and further is not None:
            if clip_norm is not None and not self.schedule.synchronous:
                raise ConfigError(
                    f"{self.schedule.scheme} clips each stage by its own norm, of which each position of the "
                    "mesh knows its part; leave clip_norm away, or take a scheme with a flush"
                )
            modules = [StageModule(stage, copy.layers) for stage, copy in self.stages.items()]
            sharding = parallelized(
                modules,
                parallelize,
                further,
                layout=layout,
                transport=self.transport,
                schedule=self.schedule,
            )
            if sharding.layout.split and any(skips is not None for skips in self.skips):
                raise ConfigError(
                    "fully_shard sums a module's gradients when those of its inputs are there, and what "
                    "comes by a Skip is none; hand it on through the layers between, or shard by tensors"
                )
            if sharding.layout.split and self._split_stages:
                raise ConfigError(
                    f"fully_shard sums a module's gradients when those of its inputs are there, and "
                    f"{self.schedule.scheme} makes those of weights later; take a scheme whose backwards are "
                    "whole, or shard by tensors"
                )
            for module in modules:
                self.stages[module.number].hang_in(module)
        self.layout, rank = sharding.layout, self.transport.rank
        self.ranks: tuple[tuple[int, ...], ...] = self.layout.grid(rank)
        self.replicas: int = len(self.ranks)
        self.replica: int = place(self.ranks, rank)[0]
        self._alike = self.layout.alike
        self._positions_may_differ = bool(self.digest_every and self.layout.further)
        """Until they were compared after the first step."""
        self._tells_loss = self.layout.is_first(rank, set(self.layout.further) - self.layout.split)
        return sharding

    def _refuse_embeddings(self, compute_dtype: torch.dtype | None) -> None:
        Setting(
            self.schedule.scheme,
            flushes=self.schedule.synchronous,
            copies=[len(holders) * self.replicas for holders in self._holders],
            tied=shared_names(self._names),
            compute_dtype=compute_dtype,
        ).refuse(self._layers_of)

    def _compile(self, compile_layers: bool | str) -> None:
        if compile_layers:
            backend = "inductor" if compile_layers is True else compile_layers
            self.streams.compiled = True
            with self.streams.turn():  # torch's compiler is not imported by several threads at once
                for stage in self.stages.values():
                    for layer in stage.layers:
                        layer.module.compile(backend=backend)

    def _connect(self) -> None:
        """To those whom messages go to or come from, and who holds the same weights."""
        self._lease.groups = self.weights.groups
        self._copies = CopyStream(self.device, _order_of_use(self.schedule, self.worker))
        every = (*self._run.lists, self._evaluation_tasks)
        peers = {task.peer for tasks in every for task in tasks if task.peer >= 0}
        self.transport.connect(peers, self.weights.groups)
        self._leave_others()

    def close(self) -> None:
        """End what is under way and give back what the pipeline holds of its transport; all workers call it.

        A pipeline that is dropped without it gives that back when the next one is made. Also a context
        manager: ``with cf.Pipeline(...) as pipeline: ...``.
        """
        if not self._lease.closed:
            self.flush()
            with self._reported():
                self._lease.close()

    def __reduce__(self) -> Never:
        """It is neither copied nor pickled."""
        raise ConfigError("a pipeline cannot be copied or pickled; keep its training_state_dict()")

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

        Without a flush, a step begins its mini-batch and leaves part of it to the next steps, or to
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
            update: whether the weights are updated; False only in schemes with a flush.
            outputs: whether ``Step.outputs`` are wanted; in schemes with a flush.

        Raises:
            ConfigError: the mini-batch has no samples, or is missing; or its tensors have different numbers
                of samples.
            WorkerError: a worker failed, or the loss or a gradient is not finite.
        """
        began = time.perf_counter()
        with self._reported(), self._owned.used(), self.streams.step(), self._kept_buffers():
            if outputs and not self.schedule.synchronous:
                raise ConfigError(
                    f"{self.schedule.scheme} ends a mini-batch in later steps, so that a step has no outputs "
                    "of its own; call evaluate(outputs=True) or predict, or take a scheme with a flush"
                )
            given = self._given(inputs, targets, kwargs, micro_batches, samples)
            batch = self._batch(given, _STEP if update else _KEEP, outputs=outputs)
            interpreter = self._run.interpreter
            interpreter.way.counting = self.steps < self.counted_steps
            feeds = [feed for feed in (batch.inputs, batch.targets) if feed is not None]
            told = self._run.step(batch, update=update)
            for feed in feeds:
                feed.wait()
            self._remember(batch)
            of_last = self._outputs(batch) if outputs else None
        seconds = time.perf_counter() - began
        if told is None:
            step = Step(self.steps, math.nan, math.nan, batch.total, seconds, None)
        else:
            step = _step_of(told, self.steps, seconds)
        if outputs:
            step = replace(step, outputs=of_last)
        if self._perhaps_unsplit:
            self._tell_unsplit()
        self.steps += 1
        if (
            batch.compared and not self._run.under_way
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
    ) -> float:
        """The mean loss of a mini-batch, on every worker; no gradients, evaluation mode.

        Flushes first what is under way. What the loss function tells beside the loss is in ``metrics`` then,
        and what the last layer gave in ``outputs``, if asked for. Args and errors as in ``step``.
        """
        self._untold = self.flush()
        with self._reported(), self._owned.used(), ExitStack() as evaluating:
            batch = self._batch(
                self._given(inputs, targets, kwargs, micro_batches, samples), _EVALUATE, outputs=outputs
            )
            for stage in self.stages.values():
                evaluating.enter_context(stage.evaluating())
            self._evaluation.run(self._evaluation_tasks, batch)
            self._remember(batch)
            rows = self.transport.gather([batch.losses.summed()[0], *batch.losses.weighed()])
            workers, weighed = self._run.workers, [row[1:] for row in rows]
            scale = 1 / workers.weight(weighed, self.steps)[0]
            self.metrics = workers.metrics(weighed, batch.losses, scale)
            self.outputs = self._outputs(batch) if outputs else None
        return scale * math.fsum(row[0] for row in rows)

    def predict(self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None) -> Any:
        """What the last layer gives for the replica's samples, in their order, on every worker.

        No gradients, evaluation mode. Tensors and numbers are put together as ``output_dims`` says. Flushes
        first what is under way.

        Args:
            inputs: as in ``step``.
            kwargs: as in ``step``.

        Raises:
            ConfigError: the inputs are missing or cannot be cut, or the outputs cannot be put together.
            WorkerError: a worker failed.
        """
        self._untold = self.flush()
        with self._reported(), self._owned.used(), torch.no_grad(), ExitStack() as evaluating:
            batch = self._batch(self._given(inputs, None, kwargs, None, None), _PREDICT, outputs=True)
            batch.has_loss = False
            for stage in self.stages.values():
                evaluating.enter_context(stage.evaluating())
            self._evaluation.run(self._evaluation_tasks, batch)
            self._remember(batch)
            return self._outputs(batch, everywhere=True)

    def _outputs(self, batch: Batch, *, everywhere: bool = False) -> Any:
        """The replica's outputs in the samples' order, on workers with the last stage or on all."""
        last = self.schedule.stages - 1
        by_unit = cast("dict[Unit, Any]", batch.outputs)
        if everywhere or len(self._holders[last]) > 1:
            mine = moved(by_unit, torch.device("cpu"))
            rows = cast("list[dict[Unit, Any]]", self.transport.gather_objects(mine))
            ours = [rows[rank] for rank in self.ranks[self.replica]]
            by_unit = {unit: output for outputs in ours for unit, output in outputs.items()}
        if not everywhere and last not in self.stages:
            return None
        units, sizes = sorted(by_unit), self._agreed.sizes
        counts = [rows.stop - rows.start for rows in (unit.rows(sizes[unit.micro_batch]) for unit in units)]
        found = joined([by_unit[unit] for unit in units], self.output_dims, "outputs", counts)
        return moved(found, self.device)

    @cached_property
    def _settled(self) -> Settled:
        """Lists of mini-batches that have shown to have their samples in their tensors."""
        return []

    def _given(
        self,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None,
        micro_batches: Iterable[Sequence[Any]] | None,
        samples: Sequence[int] | None,
    ) -> Given:
        dims = self.input_dims, self.target_dims, self.kwarg_dims
        if micro_batches is None:
            if samples is not None:
                raise ConfigError("samples= are those of micro_batches; a whole mini-batch is counted")
            return whole(inputs, targets, kwargs, dims, self._settled)
        if inputs is not None or targets is not None or kwargs is not None:
            raise ConfigError("give micro_batches, or inputs, targets and kwargs, not both")
        return ready(micro_batches, samples, self.schedule, dims, halves=self._parts > 1)

    def flush(self) -> list[Step]:
        """End what is under way, so that all weights are as after the last step; all workers call it.

        After a step of a synchronous schedule nothing is, if it has a barrier. Without a flush the next step
        warms up again.

        Returns:
            The steps whose loss and norm no step has told.

        Raises:
            WorkerError: a worker failed, or a loss is not finite.
        """
        self._only_taken()
        untold, self._untold = self._untold, []
        if not self._run.under_way:
            return untold
        began = time.perf_counter()
        with self._reported(), self._owned.used(), self.streams.step():
            if isinstance(self._run, BarrierFreeRunner):  # what follows is for all workers together
                call = _FLUSH + _UNDER_WAY
                row = [0.0, 0.0, 0.0, call, self.steps]
                more = [0.0] * (self._run.columns - len(row))
                self._agree_on_call(self.transport.gather([*row, *more]), call)
            found = self._run.flush()
        seconds = time.perf_counter() - began
        untold += [_step_of(told, told.step, seconds / len(found)) for told in found]
        if self.digest_every:
            self.weights.check_copies(f"after step {self.steps - 1}")
        return untold

    @property
    def under_way(self) -> bool:
        """Whether a ``flush`` would have something to do."""
        return self._run.under_way

    def _batch(self, given: Given, call: float, *, outputs: bool = False) -> Batch:
        self._only_alone()
        training = call in (_STEP, _KEEP)
        if training:
            self._only_own("step")
        call += _WITH_OUTPUTS * outputs
        counts = given.counts()
        mine = tuple(NOT_GIVEN if found is None else sum(found) for found in counts)
        samples = max(mine)
        takes_inputs, takes_targets = 0 in self.stages, self.schedule.stages - 1 in self.stages
        needs_targets = takes_targets and call % _WITH_OUTPUTS != _PREDICT and self.loss_function is not None
        for needed, pieces, name, stage in (
            (takes_inputs, given.inputs, "inputs", "first"),
            (needs_targets, given.targets, "targets", "last"),
        ):
            if needed and pieces is None:
                instead = (
                    ""
                    if name == "inputs"
                    else (
                        "; where the model itself makes the loss, let its last layer return it and give "
                        "loss_function=None"
                    )
                )
                raise ConfigError(
                    f"worker {self.worker} holds the {stage} stage and needs the {name}{instead}"
                )
        count = self.schedule.micro_batches
        sizes = next((tuple(found) for found in counts if found is not None), ())
        if sizes and not given.ready:
            sizes = even(samples, count)
        kind = given.kind(samples, training, *(sizes if given.ready else ()))
        await_total: Callable[[], int] | None = None
        digests = 0.0, 0.0
        under_way, barrier_free = self._run.under_way, isinstance(self._run, BarrierFreeRunner)
        if under_way:
            agreed = self._as_before(mine, kind, sizes)
            if barrier_free:
                digests = self._digests(given)
            elif self.transport.shares_process:
                comparing = self.transport.start_gather(self._digests(given))
                await_total = partial(self._compared_later, comparing, agreed.total)
        else:
            row = [*mine, kind, call, self.steps, given.form, *self._digests(given)]
            telling = self.transport.start_gather(row)
            if kind in self._shapes and samples > 0 and mine[1] in (samples, NOT_GIVEN) and not given.ready:
                # This worker knows enough to begin; what the others say is read before it sends.
                agreed = Agreed(samples, kind, samples, sizes)
                await_total = partial(self._await_agreed, telling, call)
            else:
                agreed = self._agree(telling, call, sizes)
        self._agreed = agreed
        if self.layout.split and min(agreed.sizes) < self._parts:
            raise ConfigError(
                f"a micro-batch of step {self.steps} has {min(agreed.sizes)} samples, and where fully_shard "
                f"gathers weights for each, all have {self._parts} or more; give larger mini-batches"
            )
        its_inputs, its_targets = (
            Feed(
                given.cut(pieces, dims, agreed.sizes),
                self._copies,
                at_once=not self.schedule.synchronous,  # needed when the user may change what was given
            )
            if takes
            else None
            for takes, pieces, dims in (
                (takes_inputs, given.inputs, given.input_dims),
                (takes_targets, given.targets, given.target_dims),
            )
        )
        return Batch(
            step=self.steps,
            inputs=its_inputs,
            targets=its_targets,
            samples=agreed.sizes,
            total=agreed.total,
            rows=rows_of(self.replica * count, tuple(agreed.sizes)),
            training=training,
            input_dims=given.input_dims,
            target_dims=given.target_dims,
            known=self._shapes.get(agreed.kind) if agreed.kind else None,
            learnt={},
            kept=bool(agreed.kind) and not self.dynamic_shapes,
            called=(0.0, 0.0, 0.0, call + _UNDER_WAY, self.steps, *digests),
            compare=partial(self._compare_calls, call + _UNDER_WAY, agreed.total),
            await_total=await_total,
            losses=Losses(told=self._tells_loss),
            outputs={} if outputs else None,
            compared=training and self._compares(),
            check=self._loss_check(agreed, call % _WITH_OUTPUTS) if needs_targets else None,
        )

    def _compares(self) -> bool:
        """Whether the copies of stages are compared after this step."""
        if not self.digest_every:
            return False
        first, self._positions_may_differ = self._positions_may_differ, False
        return first or (self.steps + 1) % self.digest_every == 0

    def _loss_check(self, agreed: Agreed, call: float) -> LossCheck | None:
        """What sees whether the loss is a mean over samples; None where that was seen, or does not matter."""
        keeps = isinstance(self._run, SynchronousRunner) and (self._run.waiting > 0 or call == _KEEP)
        units = self.replicas * self._parts * sum(map(bool, agreed.sizes))
        if self._loss_checks is None or (units == 1 and not keeps):
            return None
        return self._loss_checks.of(agreed.kind, evaluates=call == _EVALUATE)

    def _compare_calls(self, call: float, total: int, rows: list[list[float]]) -> None:
        """See that all told of the same call, with ``Batch.called``, and of the same mini-batches."""
        self._agree_on_call(rows, call)
        self._compared([row[5:7] for row in rows], total)

    def _only_alone(self) -> None:
        """Refuse a step of a closed pipeline, and one that would get among another pipeline's messages."""
        if self._lease.closed:
            raise ConfigError("the pipeline is closed; make another one")
        by_order = self.transport.matching is Matching.ORDER
        if by_order and any(other.under_way for other in self._lease.others()):
            raise ConfigError(
                "another pipeline of these workers has mini-batches under way, and over "
                f"{self.transport.kind} its messages would be taken for this one's; flush() it before"
            )

    def _as_before(self, mine: Sequence[int], kind: int, sizes: tuple[int, ...]) -> Agreed:
        """What is known of a mini-batch that follows others without a flush: it is like them.

        Raises:
            ConfigError: it is not.
        """
        before = self._agreed
        if (
            not {*mine} <= {NOT_GIVEN, before.samples}
            or kind not in (0, before.kind)
            or sizes not in ((), before.sizes)
        ):
            now = " and ".join(f"{n} samples" for n in sorted({*mine} - {NOT_GIVEN}))
            raise ConfigError(
                f"step {self.steps} was given {now}, the one before {before.samples}, or tensors of "
                "other shapes; flush() before mini-batches of another shape"
            )
        return before

    def _digests(self, given: Given) -> tuple[float, float]:
        """Of inputs and targets, where they are compared: always among threads, which share generators."""
        if not self.transport.shares_process and (not self.digest_every or self.steps % self.digest_every):
            return 0.0, 0.0
        return given.digests()

    def _compared_later(self, comparing: Gathering, total: int) -> int:
        return self._compared(comparing.wait(), total)

    def _compared(self, digests: Sequence[Sequence[float]], total: int) -> int:
        """``total``, if the workers of each replica were given the same.

        Raises:
            ConfigError: they were not.
        """
        for row in self._alike:
            for name, column in zip(_NAMES, zip(*(digests[rank] for rank in row), strict=True), strict=True):
                given = {digest: rank for rank, digest in zip(row, column, strict=True) if digest}
                if len(given) > 1:
                    first, second = sorted(given.values())[:2]
                    raise ConfigError(
                        f"step {self.steps}: the {name} of ranks {first} and {second} have the same shape "
                        "and other content; all workers of a replica get the same mini-batch, or None where "
                        "it is not read"
                    )
        return total

    def _await_agreed(self, telling: Gathering, call: float) -> int:
        self._agreed = self._agree(telling, call, self._agreed.sizes)
        return self._agreed.total

    def _agree(self, telling: Gathering, call: float, sizes: tuple[int, ...]) -> Agreed:
        """What all workers know of the mini-batch; ``sizes`` are this one's samples by micro-batch.

        Raises:
            ConfigError: the workers were not called with the same, or it has no samples.
        """
        self.transport.status.now("agreeing on the mini-batch")
        rows = telling.wait()
        self._agree_on_call(rows, call)
        forms = {row[5]: rank for rank, row in enumerate(rows) if row[5]}
        if len(forms) > 1:
            raise ConfigError(
                f"rank {forms[1]} was given a mini-batch and rank {forms[2]} micro_batches; give all workers "
                "one or the other"
            )
        by_replica = [self._agreed_samples(rows, replica) for replica in range(self.replicas)]
        if min(by_replica) < 1:
            where = f" of replica {by_replica.index(0)}" if self.replicas > 1 else ""
            raise ConfigError(f"the mini-batch{where} has no samples; give one or more")
        kinds = {int(rows[rank][2]) for rank in self._alike[self.replica]} - {0}
        samples, count = by_replica[self.replica], self.schedule.micro_batches
        sizes = self._agreed_sizes(sizes or (NOT_GIVEN,) * count) if 2 in forms else even(samples, count)
        if len(kinds) > 1:
            raise ConfigError(
                f"workers of replica {self.replica} were given mini-batches of different shapes; "
                "all workers of a replica get the same mini-batch"
            )
        total = self._compared([row[6:8] for row in rows], sum(by_replica))
        return Agreed(samples, kinds.pop() if kinds else 0, total, sizes)

    def _agreed_sizes(self, mine: tuple[int, ...]) -> tuple[int, ...]:
        """The samples of the replica's micro-batches.

        Raises:
            ConfigError: its workers were given others.
        """
        rows = self.transport.gather(mine)
        found = {
            tuple(map(int, rows[rank])): rank
            for rank in self._alike[self.replica]
            if rows[rank][0] != NOT_GIVEN
        }
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise ConfigError(
                f"micro-batches of rank {first} have {[*one]} samples, those of rank {second} {[*other]}; "
                "all workers of a replica get the same"
            )
        return next(iter(found))

    def _agreed_samples(self, rows: list[list[float]], replica: int) -> int:
        """The samples of a replica's mini-batch.

        Raises:
            ConfigError: its workers' inputs and targets differ in it.
        """
        told = [
            (int(samples), name, rank)
            for rank in self._alike[replica]
            for name, samples in zip(_NAMES, rows[rank], strict=False)
            if samples != NOT_GIVEN
        ]
        least, most = min(told), max(told)
        if most[0] != least[0]:
            where = f" of replica {replica}" if self.replicas > 1 else ""
            first, second = (f"{n} samples in the {name} of rank {rank}" for n, name, rank in (least, most))
            raise ConfigError(
                f"the mini-batch{where} has {first} and {second}; inputs and targets have the same samples, "
                "in the dimensions that input_dims and target_dims say"
            )
        return most[0]

    def _agree_on_call(self, rows: Sequence[Sequence[float]], call: float) -> None:
        for rank, row in enumerate(rows):
            if (row[3], row[4]) != (call, self.steps):
                mine, other = (
                    f"{_called(c)}, after {int(n)} steps" for c, n in ((call, self.steps), (row[3], row[4]))
                )
                raise ConfigError(
                    f"rank {self.transport.rank} calls {mine}; rank {rank} calls {other}; "
                    "all workers make the same calls in the same order"
                )

    def _remember(self, batch: Batch) -> None:
        if batch.known is None and batch.kept:
            self._shapes[self._agreed.kind] = batch.learnt
            if len(self._shapes) > _KINDS:  # all workers of a replica forget the same
                del self._shapes[next(iter(self._shapes))]

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
            By worker the ops in their order, with start and end in seconds. Those of schemes without a flush
            count micro-batches and versions from the last flush.
        """
        mine = platform.node(), self._run.interpreter.began_seconds, self._run.interpreter.timeline()
        rows = cast(
            "list[tuple[str, float, list[tuple[Op, float, float]]]]", self.transport.gather_objects(mine)
        )
        first: dict[str, float] = {}  # by machine: its workers share a clock, those of others do not
        for machine, began, _ in rows:
            first[machine] = min(began, first.get(machine, began))
        return [
            [(op, start + late, end + late) for op, start, end in row]
            for machine, began, row in (rows[rank] for rank in self.ranks[replica])
            for late in (began - first[machine],)
        ]

    @property
    def warm_up_steps(self) -> int:
        """Steps from an empty pipeline until all steps are alike; 0 with a flush."""
        return self._run.warm_up_steps

    @property
    def counted_steps(self) -> int:
        """First steps in which bytes are counted: as asked for, and those until all periods are alike."""
        return self.count_memory_steps + self._run.warm_up_steps

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
        return tuple(stage for stage in self._split_stages if self.stages[stage].splitting.waits is False)

    def _kept_buffers(self) -> AbstractContextManager[object]:
        """Around a step: split backwards go twice through functions that the user compiled."""
        return keeps_buffers() if self._split_stages else nullcontext()

    def _note_split_stages(self) -> None:
        split = {op.stage for op in self.schedule.ops() if op.kind.takes is None}
        self._split_stages = tuple(s for s, copy in self.stages.items() if s in split and copy.trains)
        self._perhaps_unsplit = set(self._split_stages)
        for stage in self._split_stages:
            self.stages[stage].splits = True

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

        ``averaged``, ``state_dict(ema=True)`` and ``stream_weights(ema=True)`` give it. Training states,
        checkpoints and copies in memory have it: call ``ema`` before they are loaded. ``load_state_dict``
        begins it anew.

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

        Flushes first what is under way. This worker's weights are kept once more meanwhile.

        Raises:
            ConfigError: there is no average, or the context is entered twice.
        """
        self._only_own("averaged()")
        self._untold = self.flush()
        with ExitStack() as shown:
            with self._reported():
                shown.enter_context(self.weights.averaged())
            self._shows_average = True
            try:
                yield
            finally:
                self._shows_average = False

    def state_dict(
        self, *, rank: int | None = None, local: bool = False, ema: bool = False
    ) -> dict[str, Any]:
        """The model's parameters, buffers and extra state by its own names, on the CPU; all workers call it.

        Flushes first what is under way. Tensors go one by one from who holds them to who gets them. Where the
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
            self._only_when_empty("state_dict(local=True)")
            with self.weights.averaged() if ema else nullcontext():
                return self.weights.state_dict()
        with self._reported():
            state = dict(self._streamed(rank, ema=ema))
        order = {name: number for number, name in enumerate(self._order)}
        return dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))

    def stream_weights(self, rank: int = 0, *, ema: bool = False) -> Iterator[tuple[str, Any]]:
        """What ``state_dict`` has, name by name on one rank, which has one tensor at a time in memory.

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
            self._taken = False
        return self._taking(found)

    def _streamed(self, rank: int | None, *, ema: bool) -> Iterator[tuple[str, Any]]:
        if rank is not None and not 0 <= rank < self.transport.world_size:
            raise ConfigError(f"rank={rank}; there are ranks 0 to {self.transport.world_size - 1}")
        self._only_own("the state")
        self._untold = self.flush()
        self.weights.check_copies(f"after {self.steps} steps")
        return self._averages(rank) if ema else self.weights.stream(rank)

    def _averages(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        with self.weights.averaged():
            yield from self.weights.stream(rank)

    def _taking(self, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same to its end, also for who stops in the midst."""
        try:
            while (pair := self._next(found)) is not None:
                yield pair
        finally:
            while self._next(found) is not None:
                pass
            self._taken = True

    def _next(self, found: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._reported(taking=True):
            return next(found, None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this worker's weights from a whole model's state, or from as much of it as it holds.

        Raises:
            ConfigError: a name is missing, or a shape differs.
        """
        self._only_when_empty("load_state_dict")
        self.weights.load_state_dict(state)

    def training_state_dict(self, *, rank: int | None = None, local: bool = False) -> dict[str, Any]:
        """All that a training goes on from, on the CPU; all workers call it.

        Flushes first what is under way. Another pipeline of the same model takes it, under any schedule where
        the optimiser is the same; a learning-rate scheduler wants as many stages.

        Args:
            rank: the only one that gets it; the others get an empty dict. None: all get it.
            local: only what this worker holds, without asking the others; with ``zero_stage`` 1, of the
                optimisers what it updates.

        Returns:
            ``model`` as ``state_dict`` gives it; in ``optimizer``, by parameter's name, what the optimiser
            keeps and the options of its group; in ``scheduler``, by stage, its state; ``step`` and ``seed``,
            from which all random draws come.

        Raises:
            ConfigError: gradients wait for an update, ``local`` while mini-batches are under way, or there is
                no such rank.
            WorkerError: the copies of a stage differ.
        """
        self._only_updated("training_state_dict")
        model = self.state_dict(rank=rank, local=local)
        with self._reported():
            rest = self.weights.training_state() if local else self.weights.whole_training_state(rank)
        if not local and rank not in (None, self.transport.rank):
            return {}
        return {"model": model, **rest, "step": self.steps, "seed": self.streams.seed}

    def load_training_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a training was, with as much of its state as this worker holds or more.

        Raises:
            ConfigError: a name is missing, or something does not fit; or gradients wait for an update.
        """
        self._only_updated("load_training_state_dict")
        self.load_state_dict(state["model"])
        self.weights.load_training_state(state)
        self.steps, self.streams.seed = state["step"], state["seed"]

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters from the next step on; all workers call it alike.

        Flushes first what is under way.

        Args:
            chosen: a parameter's name in the model to whether it is trained.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._only_updated("set_trainable")
        self._untold = self.flush()
        self.weights.set_trainable(chosen)
        self._shapes.clear()  # which gradients travel is known with the shapes

    def settle(self, call: str) -> None:
        """Flush what is under way, for ``call``; ``flush`` tells of it later. All workers call it.

        Raises:
            ConfigError: gradients wait for an update.
        """
        self._only_updated(call)
        self._untold = self.flush()

    def _only_own(self, call: str) -> None:
        if self._shows_average:
            raise ConfigError(
                f"{call} within averaged(), where the weights are their averages; leave it before (the state "
                "of the average is state_dict(ema=True))"
            )

    def _only_updated(self, call: str) -> None:
        self._only_own(call)
        if isinstance(self._run, SynchronousRunner) and self._run.waiting:
            raise ConfigError(f"{call} while gradients wait for an update; make a step with one before")

    def _only_taken(self) -> None:
        if not self._taken:
            raise ConfigError(
                "stream_weights() is not at its end, and other workers wait in it; take all that it gives "
                "before the next call"
            )

    def _only_when_empty(self, call: str) -> None:
        self._only_taken()
        self._only_own(call)
        if self._run.under_way:
            raise ConfigError(f"{call} while mini-batches are under way; call flush() before, on all workers")

    @contextmanager
    def _reported(self, *, taking: bool = False) -> Iterator[None]:
        """Tell the other workers of an error, so that none of them waits in vain.

        What is made meanwhile is used in later steps: none of it is made in the user's inference mode.
        """
        try:
            if my_worker() is not self._thread:
                raise ConfigError(
                    "workers are threads, and one's pipeline was called in another thread, for which that "
                    "worker may wait; call it where it was made, or launch processes (transport='gloo')"
                )
            if not taking:
                self._only_taken()
            with elsewhere(), torch.inference_mode(mode=False):
                yield
        except CounterflowError as error:
            self.transport.fail(error)
            raise
        except Exception as error:
            place = f"worker {self.worker}, step {self.steps}: {self.transport.status.doing}"
            found = worker_error(place, error, self.transport)
            self.transport.fail(found)
            raise found from error
        except BaseException as error:  # interrupted: the others must know too
            self.transport.fail(error)
            raise


_EVALUATE, _STEP, _KEEP, _PREDICT, _FLUSH = 0.0, 1.0, 2.0, 3.0, 4.0
_CALLS = {
    _EVALUATE: "evaluate",
    _PREDICT: "predict",
    _STEP: "step",
    _KEEP: "step without an update",
    _FLUSH: "flush",
}
"""What workers tell each other that they call."""
_WITH_OUTPUTS = 8.0
"""Added where outputs are asked for."""
_UNDER_WAY = 16.0
"""Added where the call follows others without an agreement of all workers."""


def _called(call: float) -> str:
    under_way, call = divmod(call, _UNDER_WAY)
    outputs, which = divmod(call, _WITH_OUTPUTS)
    shown = _CALLS[which] + (" with outputs" if outputs and which != _PREDICT else "")
    return f"{shown} without a barrier" if under_way else shown


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


def _step_of(told: StepStatistics, number: int, seconds: float) -> Step:
    """What a step tells: of itself, or of an earlier one."""
    return Step(
        number,
        told.loss,
        told.grad_norm,
        told.samples,
        seconds,
        told.step,
        told.metrics,
        told.skipped,
        told.losses,
    )


def _version_of(copy: StageCopy) -> int:
    """The version of its weights that a stage computes with."""
    return 0 if copy.versions is None else copy.versions.shown


def _order_of_use(schedule: Schedule, worker: int) -> list[int]:
    """The micro-batches in the order in which a worker runs them through its first or its last stage."""
    ends = 0, schedule.stages - 1
    ops = (op for op in schedule.orders[worker] if op.stage in ends and op.kind.whole)
    return list(dict.fromkeys(number % schedule.micro_batches for op in ops for number in op.micro_batches))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
