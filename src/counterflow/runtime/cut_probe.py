"""Runs some samples apart and together, to see whether inputs are cut where their samples are.

All samples go through the same stages, as the first micro-batch of an evaluation, so that one worker compares
all outputs; it tells the other workers of its replica what it found.

Invariant: nothing is trained, and layers' buffers and modes are as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from counterflow.common.mappings import register_mapping_classes
from counterflow.schedule.ir import Schedule
from counterflow.verification.diagnosis.input_cuts import Verdict, compare_units

from .execution.evaluation import EvaluationRunner
from .execution.step import Workers
from .mini_batch.batch import Batch

_UNITS = 3
"""Number of runs by way to cut: two units, and both together."""


_SINGLE_WAYS = 8
"""Maximum number of ways, which cut one tensor otherwise, that are tried if the stated cut may be right."""


class CutProbe:
    """One worker's part.

    Args:
        schedule: schedule of the pipeline.
        workers: where this worker is.
        evaluation: runs forwards.
        probe: makes a batch of some samples.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: Workers,
        evaluation: EvaluationRunner,
        probe: Callable[[Batch, int, int | None], Batch],
    ) -> None:
        self._workers, self._evaluation, self._probe = workers, evaluation, probe
        last, count = schedule.stages - 1, schedule.micro_batches
        self._judge = next(
            worker
            for worker, order in enumerate(schedule.orders)
            for op in order
            if op.kind.is_forward and op.stage == last and any(m % count == 0 for m in op.micro_batches)
        )
        """Worker that has the outputs of the first micro-batch."""
        count = len(workers.ranks[0])
        tags = workers.transport.reserve_tags(2 * count)
        self._reports, self._answers = range(tags, tags + count), range(tags + count, tags + 2 * count)

    def check(self, batch: Batch) -> None:
        """Check how the inputs of a mini-batch are cut, if that is due; all workers of the replica call it.

        Raises:
            ConfigError: a tensor is cut where it has no samples.
        """
        if not batch.ways:
            return
        verdicts: list[Verdict] = []
        with torch.no_grad():
            first = self._verdict(batch, None)
            if first is not Verdict.UNKNOWN:
                ways = batch.ways if first is not Verdict.SAME else min(batch.ways, _SINGLE_WAYS)
                for way in range(ways):
                    verdicts.append(self._verdict(batch, way))
                    if verdicts[-1] is Verdict.SAME:
                        break
        decided = not (first is Verdict.SAME and Verdict.SAME in verdicts)
        gathered = self._workers.transport.gather([float(decided)])  # replicas have other samples
        if batch.input_cuts is not None:
            batch.input_cuts.end(
                first,
                verdicts if first is not Verdict.SAME else (),
                decided=all(row[0] for row in gathered),
                warns=batch.inputs is not None,
            )

    def _verdict(self, batch: Batch, way: int | None) -> Verdict:
        outputs, sizes = list[Any](), list[int]()
        verdict = Verdict.UNKNOWN
        for which in range(_UNITS):
            probe = self._probe(batch, which, way)
            self._evaluation.probe(probe)
            for output in (probe.outputs or {}).values():
                register_mapping_classes(output)
                outputs.append(output)
            sizes.append(probe.total)
            if which == _UNITS - 1 and self._workers.worker == self._judge:
                failed = len(outputs) < _UNITS
                verdict = Verdict.FAILED if failed else compare_units(outputs[:2], outputs[2], sizes[:2])
            verdict = self._meet(verdict)
        return verdict

    def _meet(self, verdict: Verdict) -> Verdict:
        """Wait until all workers of the replica have run; returns the verdict of the one with the outputs."""
        workers = self._workers
        ranks, worker, control = workers.ranks[workers.replica], workers.worker, workers.transport.control
        number = torch.tensor([int(verdict)])
        if worker != self._judge:
            control.send_described([number], ranks[self._judge], self._reports[worker]).wait()
            (answer,) = control.receive_described(ranks[self._judge], self._answers[worker]).wait()
            return Verdict(int(answer.item()))
        senders = [sender for sender in range(len(ranks)) if sender != worker]
        for arrival in [
            control.receive_described(ranks[sender], self._reports[sender]) for sender in senders
        ]:
            arrival.wait()
        for sent in [
            control.send_described([number], ranks[sender], self._answers[sender]) for sender in senders
        ]:
            sent.wait()
        return verdict
