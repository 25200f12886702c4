"""The pipeline: a model, a schedule and an optimiser on the workers of this run.

Invariant: every worker makes the same calls in the same order. The agreements of all workers at the beginning
and the end of a step (samples, shapes, loss, norm) take one small gather each.
"""

from __future__ import annotations

import difflib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never, Self, Unpack

import torch
from torch import nn

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
from .execution.step import Step, Workers, replica_and_worker
from .generation import GenerationCheck
from .inference import Forwards
from .mesh.parallel import Parallelize, further_mesh, refuse_sharded
from .mesh.rank_mesh import WORKER, Mesh, rank_mesh
from .messages.compression import Compression
from .mini_batch.given import Given
from .mini_batch.losses import LossFunction
from .mini_batch.told import Call, Told
from .parameters.compressed_sums import SumCompression, refuse_uncompressed
from .parameters.loss_scale import LossScale
from .parameters.optimizers import MakeOptimizer, MakeScheduler
from .parameters.sharded_updates import refuse_unsharded
from .stages.listing import Listing
from .stages.randomness import RandomStreams
from .transport.base import Transport
from .transport.worker_watch import tells_who
from .witness.witness import Witness
from .workers.arguments import refuse_others
from .workers.lease import Lease, opened
from .workers.source_descriptions import details_of_loss, details_of_model, versions


class Pipeline(Forwards):
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
        self.device, self.steps = transport.device, 0
        refuse_sharded(model)
        further = further_mesh(mesh, parallelize, transport)
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
        self._listing = Listing(model, list_layers)
        refuse_others(
            transport,
            its.schedule,
            {"model": details_of_model(model), "loss function": details_of_loss(loss_function)},
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
        self._perhaps_unsplit = set(held.split)
        self.dims = held.dims
        self.ranks: tuple[tuple[int, ...], ...] = self.dims.replica_ranks(transport.rank)
        self.replicas: int = len(self.ranks)
        self.replica: int = replica_and_worker(self.ranks, transport.rank)[0]
        refuse_embeddings(its, execution, self.replicas)
        self._lease: Lease[TransportUser] = opened(transport, self)
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
        self._perhaps_compiled = set(self.compiled)
        self.compression = Compression(self.device) if execution.compress else None
        workers = Workers(self.ranks, self.replica, self.worker, transport)
        self._run, self._evaluation = runners_of(
            its, held, execution, workers=workers, weights=self.weights, compression=self.compression
        )
        self._calls = CallGuard(self.worker, transport, self._run, self._lease)
        self._lease.groups = self.weights.groups
        transport.connect(self._run.peers | self._evaluation.peers, self.weights.groups)
        held.leave_others(its, self.ranks[self.replica])
        self._recordings = Recordings.of(its, held, transport)
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
        self._untold: list[Step] = []
        self._sealed = True
        self._generation_check = GenerationCheck()
        self._cut_probe = CutProbe(self.schedule, workers, self._evaluation, self._batches.probe)

    def close(self) -> None:
        """End what is in flight and give back what the pipeline holds of its transport; all workers call it.

        A pipeline that is dropped without it gives that back when the next one is made. Also a context
        manager: ``with cf.Pipeline(...) as pipeline: ...``. After a call that failed nothing is left to end.
        """
        if not (self._lease.closed or self._calls.failed):
            self.flush()
            with self._reported():
                self._calls.agree(Call.CLOSE, self.steps)
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

        def given() -> Given:
            if outputs and not self.schedule.synchronous:
                raise ConfigError(
                    f"{self.schedule.scheme} ends a mini-batch in later steps, so that a step has no outputs "
                    "of its own; call evaluate(outputs=True) or predict, or take a synchronous scheme"
                )
            self._run.refuse_no_update(update=update)
            return self._batches.given(inputs, targets, kwargs, micro_batches, samples)

        with self._reported():
            with self._held.owned.used(), self.streams.step(), self._held.kept_buffers():
                batch = self._batch(given, Call.STEP if update else Call.KEEP, outputs=outputs)
                self._witness.find_state(batch)
                if self._witness.due(training=True):
                    self._witness.begin(batch, in_flight=self._run.in_flight)
                self._run.interpreter.saved.counting = self.steps < self.counted_steps
                feeds = batch.feeds
                told = self._run.step(batch, update=update)
                for feed in feeds:
                    feed.wait()
                self._batches.remember(batch)
                of_last = self._outputs(batch) if outputs else None
                self._witness.end(in_flight=self._run.in_flight)
            seconds = time.perf_counter() - began
            if told is None:
                step = Step(self.steps, math.nan, math.nan, batch.total, seconds, None)
            else:
                step = told.step_of(self.steps, seconds)
            if outputs:
                step = replace(step, outputs=of_last)
            if self._perhaps_unsplit:
                self._tell_unsplit()
            if self._perhaps_compiled:
                self._tell_compiled()
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
        self._calls.require_stream_consumed()
        untold, self._untold = self._untold, []
        if self._evaluation.in_flight:
            with self._reported():
                self._evaluation.drain()
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
