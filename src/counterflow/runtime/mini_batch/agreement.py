"""Agreement of all workers before they run a mini-batch: on the call, its samples, shapes and contents.

Invariant: every worker that continues has the same call and the same mini-batch as all others, or all end
with an error that names the difference. The agreement is one small gather a step; a worker that knows enough
to begin reads the other reports before it sends anything. A worker that refuses its mini-batch reports that
in the same gather: if nobody has begun, all refuse it, and go on. ``batches.py`` decides what a batch
contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from counterflow.errors import ConfigError

from ..transport.base import Gathering, PeerLost, TimedOut, Transport
from .refusal import Refusal, refusing
from .step_report import BatchForm, CallKind, CallReport, SampleCounts, refuse_other_calls
from .user_batch import UserBatch, even

_NAMES = "inputs", "targets"


class Agreed(NamedTuple):
    """Facts of a mini-batch that all workers know.

    Attributes:
        samples: of the replica.
        kind: its signature; 0: nobody knows the shapes.
        total: samples of all replicas.
        sizes: samples by micro-batch.
        signatures: signatures of the micro-batches, if they were ready; empty: nobody knows them.
        ways: number of other ways to cut its inputs; 0: the cut needs no check.
    """

    samples: int = 0
    kind: int = 0
    total: int = 0
    sizes: tuple[int, ...] = ()
    signatures: tuple[int, ...] = ()
    ways: int = 0


@dataclass(frozen=True, slots=True)
class Peers:
    """Workers with which this worker agrees.

    Attributes:
        ranks: ranks with the same samples, by replica.
        replica: this worker's.
        transport: how to reach them.
        same_sequences: replicas whose positions share sequences, in groups.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica: int
    transport: Transport
    same_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.ranks)


def agreed_call(report: CallReport, transport: Transport) -> list[CallReport]:
    """Gather the reports of a call by rank; all workers call it.

    Args:
        report: report of this worker.
        transport: transport to the others.

    Raises:
        ConfigError: another worker makes another call.
    """
    rows = [CallReport.unpack(row) for row in transport.gather(report.pack())]
    refuse_other_calls(report, rows, transport.rank)
    return rows


class Agreement:
    """One worker's part.

    Args:
        peers: workers to agree with.
        micro_batches: of a replica's mini-batch.
        digest_every: steps after which the contents of mini-batches are compared; 0: never. Among threads,
            which share generators, they always are.
    """

    def __init__(self, peers: Peers, micro_batches: int, digest_every: int) -> None:
        self._peers, self._transport = peers, peers.transport
        self._micro_batches, self._digest_every = micro_batches, digest_every
        self.last = Agreed()
        """Agreement on the last mini-batch."""
        self._reports: list[SampleCounts] = []
        self._samples = 0, 0
        """Samples of this replica and of all, by the last reports."""

    def refuse(self, error: Exception, step: int) -> Exception:
        """Report to all workers that this one refuses its mini-batch, of which it has done nothing.

        Args:
            error: the reason.
            step: number of earlier steps.

        Returns:
            A refusal, if nobody has begun; else the error.
        """
        try:
            rows = self._transport.gather(CallReport(CallKind.REFUSE, step).pack())
            if any(CallReport.unpack(row).begins for row in rows):
                return error
            self._transport.gather_objects(f"{error}")
        except (PeerLost, TimedOut):
            return error
        return Refusal(error)

    def begin(
        self,
        report: CallReport,
        user_batch: UserBatch,
        sizes: tuple[int, ...],
        signatures: Sequence[int],
        *,
        known: bool,
    ) -> Callable[[], int] | None:
        """Agree on a mini-batch that begins with nothing in flight.

        Args:
            report: this worker's report of the mini-batch, without its contents.
            user_batch: inputs and targets of this worker.
            sizes: samples by micro-batch; empty: this worker's input does not determine them.
            signatures: signatures of micro-batches that are ready; empty: this worker has no inputs.
            known: whether this worker knows enough to begin before it receives the other reports.

        Returns:
            A function that waits for the others and returns the samples of all replicas; None: all is agreed.
        """
        report = self._with_digests(report, user_batch)._replace(begins=known)
        gathering = self._transport.start_gather(report.pack())
        if not known:
            self.last = self._agree(gathering, report, sizes, signatures)
            return None
        samples = sum(sizes)
        self.last = Agreed(samples, report.kind, samples, sizes)
        return partial(self._await, gathering, report)

    def follow(
        self, report: CallReport, user_batch: UserBatch, sizes: tuple[int, ...], *, reports_later: bool
    ) -> tuple[CallReport, Callable[[], int] | None]:
        """Assume that a mini-batch that follows others in asynchronous schemes is like the previous one.

        Args:
            report: as in ``begin``.
            user_batch: as in ``begin``.
            sizes: as in ``begin``.
            reports_later: whether this worker reports the mini-batch with its loss.

        Returns:
            The report to send with the loss; and what ``begin`` returns.

        Raises:
            ConfigError: the mini-batch is not like the previous one.
        """
        before = self.last
        counts = {report.inputs, report.targets} - {None}
        if (
            not counts <= {before.samples}
            or report.kind not in (0, before.kind)
            or sizes not in ((), before.sizes)
        ):
            now = " and ".join(f"{n} samples" for n in sorted(n for n in counts if n is not None))
            raise ConfigError(
                f"step {report.step} was given {now}, the one before {before.samples}, or tensors of "
                "other shapes; flush() before mini-batches of another shape"
            )
        if reports_later:
            return self._with_digests(report, user_batch), None
        if not self._transport.shares_process:
            return report, None
        gathering = self._transport.start_gather(user_batch.digests())
        return report, partial(self._await_digests, gathering, report.step)

    def compare(self, report: CallReport, rows: Sequence[CallReport]) -> None:
        """Check that all workers report this call and equal contents.

        Raises:
            ConfigError: the reports differ.
        """
        refuse_other_calls(report, rows, self._transport.rank)
        self._compare_digests(report.step, [row.digests for row in rows])

    def _with_digests(self, report: CallReport, user_batch: UserBatch) -> CallReport:
        period = self._digest_every
        if self._transport.shares_process or (period and report.step % period == 0):
            report = report._replace(digests=user_batch.digests())
            if self._peers.same_sequences:
                return report._replace(sequences=user_batch.sequence_digests())
        return report

    def _await(self, gathering: Gathering, report: CallReport) -> int:
        self.last = self._agree(gathering, report, self.last.sizes, ())
        return self.last.total

    def _await_digests(self, gathering: Gathering, step: int) -> int:
        self._compare_digests(step, gathering.wait())
        return self.last.total

    def _agree(
        self, gathering: Gathering, report: CallReport, sizes: tuple[int, ...], signatures: Sequence[int]
    ) -> Agreed:
        self._transport.status.now("agreeing on the mini-batch")
        rows = list(map(CallReport.unpack, gathering.wait()))
        nobody_began = not any(row.begins for row in rows)
        self._follow_refusals(rows, nobody_began=nobody_began)
        refuse_other_calls(report, rows, self._transport.rank)
        with refusing() if nobody_began else nullcontext():
            reports = [row.sample_counts for row in rows]
            if reports != self._reports:  # else it is as the last one was
                samples_of_all = samples_of(reports, self._peers)
                self._compare_kinds(reports)
                self._samples, self._reports = samples_of_all, reports
            (samples, total), agreed_kinds = self._samples, tuple[int, ...]()
            if any(report.form is BatchForm.READY for report in reports):
                sizes, agreed_kinds = self._agreed_sizes(sizes, signatures)
            else:
                sizes = even(samples, self._micro_batches)
            self._compare_digests(report.step, [row.digests for row in rows])
            self._compare_sequences(report.step, [row.sequences for row in rows])
        peers = self._peers
        ranks = peers.ranks[peers.replica]
        kind = max(reports[rank].kind for rank in ranks)  # 0 where there are no inputs
        return Agreed(samples, kind, total, sizes, agreed_kinds, max(rows[rank].ways for rank in ranks))

    def _follow_refusals(self, rows: Sequence[CallReport], *, nobody_began: bool) -> None:
        rank = next((rank for rank, row in enumerate(rows) if row.call is CallKind.REFUSE), None)
        if rank is None:
            return
        if not nobody_began:
            raise ConfigError(
                f"rank {rank} refused its mini-batch, which other workers had begun; its own error says why"
            )
        reasons = cast("list[str | None]", self._transport.gather_objects(None))
        rank, reason = next(pair for pair in enumerate(reasons) if pair[1] is not None)
        raise Refusal(ConfigError(f"rank {rank} refused its mini-batch: {reason}"))

    def _compare_kinds(self, reports: Sequence[SampleCounts]) -> None:
        for replica, ranks in enumerate(self._peers.ranks):
            if len({reports[rank].kind for rank in ranks} - {0}) > 1:
                raise ConfigError(
                    f"workers of replica {replica} were given mini-batches of different shapes; "
                    "all workers of a replica get the same mini-batch"
                )
        kinds = [max(reports[rank].kind for rank in ranks) for ranks in self._peers.ranks]
        for group in self._peers.same_sequences:
            for replica in group:
                if kinds[replica] != kinds[group[0]]:
                    first, second = (self._peers.ranks[number][0] for number in (group[0], replica))
                    raise ConfigError(
                        f"ranks {first} and {second} share sequences, and were given mini-batches of other "
                        "shapes; give both their cf.share_sequence(tensor, pipeline.context) of the same "
                        "samples"
                    )

    def _agreed_sizes(
        self, sizes: tuple[int, ...], signatures: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        count, peers = self._micro_batches, self._peers
        none = (0,) * count
        rows = self._transport.gather([bool(sizes), *(sizes or none), *(signatures or none)])
        by_replica = [
            {tuple(map(int, rows[rank][1 : 1 + count])): rank for rank in ranks if rows[rank][0]}
            for ranks in peers.ranks
        ]
        for of_replica in by_replica:
            if len(of_replica) > 1:
                (first_sizes, first), (second_sizes, second) = list(of_replica.items())[:2]
                raise ConfigError(
                    f"micro-batches of rank {first} have {[*first_sizes]} samples, those of rank {second} "
                    f"{[*second_sizes]}; all workers of a replica get the same"
                )
        replica_rows = [rows[rank] for rank in peers.ranks[peers.replica]]
        known = (tuple(map(int, row[1 + count :])) for row in replica_rows if row[1 + count])
        return next(iter(by_replica[peers.replica])), next(known, ())

    def _compare_digests(self, step: int, digests: Sequence[Sequence[float]]) -> None:
        if not any(map(any, digests)):
            return
        for row in self._peers.ranks:
            for name, first, second in _differences(row, digests):
                raise ConfigError(
                    f"step {step}: the {name} of ranks {first} and {second} have the same shape "
                    "but different contents; all workers of a replica get the same mini-batch, or None "
                    "where it is not read"
                )

    def _compare_sequences(self, step: int, digests: Sequence[Sequence[float]]) -> None:
        for group in self._peers.same_sequences:
            ranks = [rank for replica in group for rank in self._peers.ranks[replica]]
            for name, first, second in _differences(ranks, digests):
                raise ConfigError(
                    f"step {step}: ranks {first} and {second} share sequences, and their {name} are "
                    "shares of different ones; give both the same samples, the part "
                    "pipeline.data.number of pipeline.data.count"
                )


def _differences(ranks: Sequence[int], digests: Sequence[Sequence[float]]) -> Iterator[tuple[str, int, int]]:
    # What of a mini-batch two of the ranks have otherwise, and these; a digest of 0 is not known.
    for name, column in zip(_NAMES, zip(*(digests[rank] for rank in ranks), strict=True), strict=True):
        rank_of = {digest: rank for rank, digest in zip(ranks, column, strict=True) if digest}
        if len(rank_of) > 1:
            first, second = sorted(rank_of.values())[:2]
            yield name, first, second


def samples_of(reports: Sequence[SampleCounts], peers: Peers) -> tuple[int, int]:
    """The samples of this worker's replica, and those of all.

    Raises:
        ConfigError: the workers were not given the same, or it has no samples.
    """
    forms = {report.form: rank for rank, report in enumerate(reports) if report.form is not BatchForm.NOTHING}
    if len(forms) > 1:
        raise ConfigError(
            f"rank {forms[BatchForm.UNSPLIT]} was given a mini-batch and rank {forms[BatchForm.READY]} "
            "micro_batches; give all workers one or the other"
        )
    by_replica = [_samples_of_replica(reports, peers, replica) for replica in range(peers.replicas)]
    if min(by_replica) < 1:
        where = f" of replica {by_replica.index(0)}" if peers.replicas > 1 else ""
        raise ConfigError(f"the mini-batch{where} has no samples; give one or more")
    return by_replica[peers.replica], sum(by_replica)


def _samples_of_replica(reports: Sequence[SampleCounts], peers: Peers, replica: int) -> int:
    counts = [
        (samples, name, rank)
        for rank in peers.ranks[replica]
        for name, samples in zip(_NAMES, (reports[rank].inputs, reports[rank].targets), strict=True)
        if samples is not None
    ]
    least, most = min(counts), max(counts)
    if most[0] != least[0]:
        where = f" of replica {replica}" if peers.replicas > 1 else ""
        first, second = (f"{n} samples in the {name} of rank {rank}" for n, name, rank in (least, most))
        raise ConfigError(
            f"the mini-batch{where} has {first} and {second}; inputs and targets have the same samples, "
            "in the dimensions that input_dims and target_dims say"
        )
    return most[0]
