"""Comparison of one unit of a mini-batch with the model's own forward, at some steps.

The forward runs before the step, with the weights of its forwards; the loss and the output that the schedule
computes for the unit are saved during the step and compared after it (``UnitWatch``). While mini-batches are
in flight the stages' weights are of different updates: then the layers run one after another in place of the
schedule. For a list of layers the model's own forward is these layers, one after another, on the whole unit.

Invariant: all workers make the same calls. A difference is an error on all of them, and it names the first
call of a module that differs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.skip import Carried
from counterflow.capture.layer import CapturedLayer
from counterflow.common.doubling import is_doubling
from counterflow.errors import ConfigError, CounterflowError
from counterflow.execution import Execution
from counterflow.schedule.ir import Schedule
from counterflow.schedule.modes import Recompute
from counterflow.verification.diagnosis.graded_losses import copied
from counterflow.verification.diagnosis.tolerances import MODELS

from ..execution.outputs import part as part_of
from ..execution.step import Workers
from ..mini_batch.batch import Batch
from ..mini_batch.loss_output import LossFunction, elements_in
from ..mini_batch.unit_watch import UnitWatch, mean_loss
from ..stages.aux_loss import split_aux_losses
from ..stages.evaluation_mode import evaluating
from ..stages.named_layer import NamedLayer
from ..stages.randomness import RandomStreams
from ..stages.remote import RemoteTensorError
from ..stages.stage import LocalStage
from ..transport.base import PeerLost, TimedOut
from .comparison import Comparison, Result, same
from .model_forward import ModelForward
from .owner import Owner, StageResult, StageRun
from .rounds import RemoteError, Rounds, packed, unpacked
from .sketches import CallSketch, first_difference
from .state import other_calls, refusal_of_state
from .units import Units, WitnessUnit

_LOG = logging.getLogger(__name__)

_PENDING, _SAME, _DIFFERENT, _FAILED = 0.0, 1.0, 2.0, 3.0
"""Verdicts of the worker that compares."""


class Witness:
    """Comparisons of one pipeline.

    Args:
        model: the user's model, or its list of layers.
        layers: layers of each stage, as the user passed them.
        schedule: schedule of the pipeline.
        stages: this worker's stages.
        workers: place of this worker.
        streams: streams of random draws.
        loss_function: function of output and target; None: the output is the loss.
        execution: options of the run.
        sharded: whether weights are sharded by ``parallelize``; then nothing is compared.
    """

    def __init__(
        self,
        model: object,
        layers: Sequence[Sequence[NamedLayer]],
        schedule: Schedule,
        stages: Mapping[int, LocalStage],
        workers: Workers,
        *,
        streams: RandomStreams,
        loss_function: LossFunction | None,
        execution: Execution,
        sharded: bool,
    ) -> None:
        self._schedule, self._stages, self._workers = schedule, stages, workers
        self._loss_function, self._period = loss_function, execution.witness_every
        self._options = [
            name
            for name, has in (
                ("slices", schedule.workload.slices > 1),
                ("recompute", execution.recompute is not Recompute.NONE),
                ("compile", bool(execution.compile)),
                ("capture", execution.capture),
            )
            if has
        ]
        self._otherwise = not {"slices", "compile"}.isdisjoint(self._options)
        lower = execution.compress or execution.computes_in is not None
        self._least = MODELS.of(torch.bfloat16) if lower else 0.0
        self._owner, self._streams = Owner(stages, streams, self._least), streams
        self._other_calls = "" if sharded else other_calls(schedule, len(workers.ranks))
        modules = {layer.index: layer.module for of_stage in layers for layer in of_stage}
        self._stage_of = {layer.index: n for n, of_stage in enumerate(layers) for layer in of_stage}
        captured = {n: layer for n, layer in modules.items() if isinstance(layer, CapturedLayer)}
        is_captured = len(captured) == len(modules) and all(layer.is_of_model for layer in captured.values())
        self._captured = captured if is_captured else {}
        self._model = captured[0].model if is_captured else model if isinstance(model, nn.Module) else None
        self._sharded = sharded
        self._calls = Counter[bool]()
        self._units = Units(schedule, workers)
        self._tag = workers.transport.reserve_tags(1)
        if not self._period and workers.transport.rank == 0:
            _LOG.warning("witness_every = 0: no step is compared with the model's own forward")
        self._begun: list[Comparison] = []
        self._undecided = False

    # -- steps

    def due(self, *, training: bool) -> bool:
        """Count a step or an evaluation; return whether it is compared: 1, 2, 4, 8 …, and periodically."""
        self._calls[training] += 1
        number, period = self._calls[training], self._period
        if not period or self._sharded:
            return False
        return number % period == 0 or (number < period and is_doubling(number))

    def begin(self, batch: Batch, *, in_flight: bool) -> None:
        """Run the model's own forward on a unit of a mini-batch, before its step; all workers call it.

        Args:
            batch: the mini-batch.
            in_flight: whether earlier mini-batches are in flight.

        Raises:
            ConfigError: the forward differs from the layers.
        """
        if not self._compares(batch, in_flight=in_flight):
            return
        unit = self._agreed_unit(batch)
        if unit is None:
            return
        watch = None
        if not in_flight:
            sliced = self._schedule.workload.slices > 1 and batch.training
            watch = UnitWatch(
                unit.unit.micro_batch,
                None if sliced else unit.unit.part,
                self._schedule.workload.slices if sliced else 1,
                has_loss=batch.has_loss,
            )
        comparison = Comparison(unit, batch, watch)
        self._read_inputs(comparison)
        rounds = Rounds(self._workers.transport, unit.rank, self._tag)
        with self._running(comparison):
            if watch is None:
                self._compare_layers(comparison, rounds)
                return
            comparison.result = self._forward(comparison, rounds)
        if self._rank == unit.rank:
            batch.watch = watch
        self._begun.append(comparison)

    def find_state(self, batch: Batch) -> None:
        """Refuse layers that keep state between forwards, before the first step; all workers call it.

        Raises:
            ConfigError: a layer's output depends on its earlier forwards, and its calls are not those of one
                process.
        """
        why, self._other_calls = self._other_calls, ""
        unit = self._agreed_unit(batch) if why else None
        if unit is None:
            return
        comparison = Comparison(unit, batch, None)
        self._read_inputs(comparison)
        rounds = Rounds(self._workers.transport, unit.rank, self._tag)
        with self._running(comparison):
            result = self._layers_in_turn(comparison, rounds, repeats=True)
            layer = "" if result is None else result.stateful
            self._raise(comparison, layer and refusal_of_state(layer, why))

    def _agreed_unit(self, batch: Batch) -> WitnessUnit | None:
        batch.agree()
        self._workers.transport.status.now("running the model's own forward")
        return self._units.choose(batch)

    def _compares(self, batch: Batch, *, in_flight: bool) -> bool:
        if self._captured:
            return True
        return batch.training and not in_flight and self._otherwise

    def end(self, *, in_flight: bool) -> None:
        """Compare what the schedule has computed since, after a step; all workers call it.

        Args:
            in_flight: whether mini-batches are in flight, which later steps end.

        Raises:
            ConfigError: a unit's loss or output is not that of the model's own forward.
        """
        for comparison in tuple(self._begun):
            verdict = self._workers.transport.gather([self._verdict(comparison)])[comparison.unit.rank][0]
            if verdict == _PENDING and in_flight:
                continue
            self._begun.remove(comparison)
            comparison.batch.watch = None
            if verdict == _FAILED:
                self._raise(comparison, "" if comparison.result is None else comparison.result.failure)
            if verdict == _DIFFERENT:
                rounds = Rounds(self._workers.transport, comparison.unit.rank, self._tag)
                with self._running(comparison):
                    self._compare_layers(comparison, rounds, differs=True)

    @contextmanager
    def _running(self, comparison: Comparison) -> Iterator[None]:
        unit, batch = comparison.unit, comparison.batch
        model = [] if self._model is None or batch.training or self._rank != unit.rank else [self._model]
        # Threads share modules: the model's modes are set before those of the stages here, and restored after
        # these and before those of the evaluation that follows.
        with self._streams.step(), evaluating(model):
            self._meet_threads()
            with self._owner.running(batch.step, unit.rows, training=batch.training):
                yield
            self._find_changes()
        self._meet_threads()

    def _meet_threads(self) -> None:
        if self._workers.transport.shares_process:
            self._workers.transport.gather([])

    def _find_changes(self) -> None:
        rows = self._workers.transport.gather([float(self._owner.changes_buffers)])
        # If a run changed buffers, only the first units of a step can be compared.
        self._units.only_first = self._units.only_first or any(map(sum, rows))

    # -- units

    @property
    def _rank(self) -> int:
        return self._workers.transport.rank

    def _read_inputs(self, comparison: Comparison) -> None:
        unit, batch = comparison.unit, comparison.batch
        number = unit.unit.micro_batch
        if self._rank == unit.inputs_rank and batch.inputs is not None:
            value = part_of(batch.inputs[number], unit.unit, batch, of_targets=False)
            comparison.value = pytree.tree_map_only(Tensor, copied, value)
        if self._rank == unit.rank and batch.targets is not None and self._loss_function is not None:
            target = part_of(batch.targets[number], unit.unit, batch, of_targets=True)
            comparison.target = pytree.tree_map_only(Tensor, copied, target)

    # -- forwards

    def _forward(self, comparison: Comparison, rounds: Rounds) -> Result | None:
        unit = comparison.unit
        if not self._captured:
            return self._layers_in_turn(comparison, rounds)
        tensors: dict[str, Tensor] = {}
        if self._rank in self._workers.ranks[unit.replica]:
            tensors = self._owner.tensors(self._captured)
        compares = self._rank == unit.rank
        rows = rounds.gather((comparison.value, {} if compares else tensors))
        if not compares:
            rounds.serve(self._owner.answer)
            return None
        tensors = {name: tensor for _, of_rank in rows for name, tensor in of_rank.items()} | tensors
        try:
            return self._model_forward(comparison, rounds, rows[unit.inputs_rank][0], tensors)
        finally:
            rounds.end()

    def _model_forward(
        self,
        comparison: Comparison,
        rounds: Rounds,
        value: Any,
        tensors: Mapping[str, Tensor],
    ) -> Result:
        unit = comparison.unit
        local_stage = self._stages[self._schedule.stages - 1]
        assert self._model is not None
        forward = ModelForward(
            self._model,
            self._captured,
            self._owner,
            rounds,
            rank_of=lambda layer: self._units.rank_of_stage(unit, self._stage_of[layer]),
            precision=local_stage.precision,
            device=self._workers.transport.device,
        )
        self._order = forward.order
        try:
            output, terms = forward.run(pytree.tree_map_only(Tensor, copied, value), tensors)
            loss = self._loss(comparison, output, terms)
        except (PeerLost, TimedOut):
            raise
        except (RemoteError, RemoteTensorError, torch.OutOfMemoryError) as error:
            return Result(undecided=str(error))
        except CounterflowError:
            raise
        except Exception as error:  # the step, whose layers do not read what it reads, decides
            if any(layer.differentiates for layer in self._captured.values()):
                return Result(undecided=f"it takes gradients across workers: {error}")
            return Result(
                failure=f"step {comparison.batch.step}: the {type(self._model).__name__}'s own forward fails "
                f"on micro-batch {unit.unit.micro_batch} ({type(error).__name__}: {error}), and its layers "
                "do not: what it reads has changed since they were found; find the layers again"
            )
        return Result(pytree.tree_map_only(Tensor, copied, output), loss, forward.draws)

    def _layers_in_turn(
        self, comparison: Comparison, rounds: Rounds, *, repeats: bool = False
    ) -> Result | None:
        unit = comparison.unit
        value = rounds.gather(comparison.value)[unit.inputs_rank]
        if self._rank != unit.rank:
            rounds.serve(self._owner.answer)
            return None
        try:
            result = self._through_stages(unit, rounds, value, repeats=repeats)
            output, terms = split_aux_losses(result.value)
            loss = None if repeats else self._loss(comparison, output, terms)
            output = pytree.tree_map_only(Tensor, copied, output)
            return Result(output, loss, result.draws, stateful=result.stateful)
        except (PeerLost, TimedOut):
            raise
        except Exception as error:  # the step reports an error of its layers
            return Result(undecided=f"{type(error).__name__}: {error}")
        finally:
            rounds.end()

    def _through_stages(self, unit: WitnessUnit, rounds: Rounds, value: Any, *, repeats: bool) -> StageResult:
        skips: dict[int, Any] = {}
        draws, stateful = False, ""
        for stage in range(self._schedule.stages):
            request = StageRun(stage, Carried(value, skips) if skips else value, repeats and not stateful)
            result: StageResult
            if stage in self._stages:
                result = self._owner.run(unpacked(packed(request), self._workers.transport.device))
            else:
                result = rounds.call(self._units.rank_of_stage(unit, stage), request)
            value, draws = result.value, draws or result.draws
            stateful = stateful or result.stateful
            if type(value) is Carried:
                skips |= value.skips
                value = value.value
        return StageResult(value, draws, stateful)

    def _loss(self, comparison: Comparison, output: Any, terms: Mapping[str, Tensor]) -> float | None:
        if not comparison.batch.has_loss:
            return None
        local_stage, rows = self._stages[self._schedule.stages - 1], comparison.unit.rows
        size, samples = elements_in(output), rows.stop - rows.start
        if self._loss_function is not None:
            call = self._loss_function, pytree.tree_map_only(Tensor, copied, output), comparison.target
            output = local_stage.loss_of_step(call, comparison.batch.step, rows)
        loss = local_stage.means.read(output, samples)
        if terms:
            loss = loss.with_added(terms)
        return mean_loss([loss.as_unit_loss(comparison.unit.unit, samples, samples, size)])

    # -- comparisons

    def _verdict(self, comparison: Comparison) -> float:
        if self._rank != comparison.unit.rank:
            return _PENDING
        result, watch = comparison.result, comparison.watch
        assert result is not None
        assert watch is not None
        if not watch.complete:
            return _PENDING
        if result.failure:
            return _FAILED
        if result.undecided:
            self._warn_undecided(result.undecided)
            return _SAME
        if result.draws and (watch.part is None or not comparison.batch.training):
            self._warn_undecided("it draws random numbers, and slices and evaluations draw others")
            return _SAME
        return _SAME if same(result, comparison.schedule_result(), self._least) else _DIFFERENT

    def _compare_layers(self, comparison: Comparison, rounds: Rounds, *, differs: bool = False) -> None:
        sketches: list[dict[Any, CallSketch]] = []
        results: list[Result | None] = []
        for run in (self._forward, self._layers_in_turn):
            self._owner.sketches = {}
            try:
                results.append(run(comparison, rounds))
            finally:
                calls, self._owner.sketches = self._owner.sketches, None
            all_calls: dict[Any, CallSketch] = {}
            for row in cast("list[dict[Any, CallSketch]]", self._workers.transport.gather_objects(calls)):
                all_calls |= row or {}
            sketches.append(all_calls)
        text = ""
        if self._rank == comparison.unit.rank:
            text = self._difference(comparison, results, sketches, differs=differs)
        self._raise(comparison, text)

    def _raise(self, comparison: Comparison, text: str) -> None:
        text = cast("str", self._workers.transport.gather_objects(text)[comparison.unit.rank])
        if text:
            raise ConfigError(text)

    def _difference(
        self,
        comparison: Comparison,
        results: list[Result | None],
        sketches: list[dict[Any, CallSketch]],
        *,
        differs: bool,
    ) -> str:
        model_result, layers = results
        assert model_result is not None
        assert layers is not None
        if model_result.failure:
            return model_result.failure
        if model_result.undecided or layers.undecided:
            self._warn_undecided(model_result.undecided or layers.undecided)
            return ""
        agree = same(model_result, layers, self._least)
        if agree and not differs:
            return ""
        where = ""
        if self._captured and not agree:
            limit = MODELS.of(torch.float32)
            where = first_difference(self._order, sketches[0], sketches[1], limit)
        losses = model_result.loss, layers.loss
        if differs and comparison.watch is not None and comparison.result is not None:
            losses = comparison.result.loss, comparison.watch.loss()
        name = type(self._model).__name__ if self._model is not None else "model"
        return comparison.described(name, losses, where, layers_agree=agree, options=self._options)

    def _warn_undecided(self, why: str) -> None:
        if not self._undecided:
            self._undecided = True
            _LOG.warning("the model's own forward could not be compared with the pipeline's: %s", why)
