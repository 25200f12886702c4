"""Zero Bubble's Table 5: bubble rates of 1F1B, ZB-H1 and ZB-H2, and of the best orders within a memory.

Times are those that the paper measured (its Table 9); a stage is a worker's part of the model, so each of two
stages per worker takes half. Messages occupy no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from counterflow.schedule.ir import Schedule
from counterflow.schedule.schemes import dapple, dualpipe_v, interleaved_zb, zb_h1, zb_h2, zb_v
from counterflow.simulation import ByteCosts, Costs, Simulation, simulate

from ..closed_forms import Range
from .layout_table import Relation, Row

_SOURCE = "Zero Bubble Table 5"
_SEQUENCE = 1024


@dataclass(frozen=True, slots=True)
class _Setting:
    """A model on p workers with m micro-batches, as published.

    Attributes:
        model: name of the model.
        width: its hidden size h.
        heads: number of heads a.
        workers: number of workers p.
        micro_batches: number of micro-batches m.
        times: F, I, W and a message, in milliseconds.
        published: rates of 1F1B, ZB-H1, ZB-H2, and of the best order found within p·M_B and 2p·M_B.
    """

    model: str
    width: int
    heads: int
    workers: int
    micro_batches: int
    times: Sequence[float]
    published: Sequence[str]

    def costs(self, stages: int) -> Costs:
        """Costs with this many stages per worker; memory in the paper's units, M_B and M_W of its section
        2.3.
        """
        forward, inputs, weights, message = self.times
        saved = 34 * self.width + 5 * self.heads * _SEQUENCE
        return Costs(
            forward=forward / stages,
            backward=(inputs + weights) / stages,
            input_gradient=inputs / stages,
            weight_gradients=weights / stages,
            p2p=message,
            link="infinite",
            memory=ByteCosts(activations=1 / stages, kept_for_weights=32 * self.width / saved / stages),
        )

    def rate(self, result: Simulation) -> Fraction:
        """(cost − m(F+I+W)) / cost to the digits printed; the cost is the longest span of a worker."""
        first: dict[int, float] = {}
        cost = 0.0
        for span in result.timeline:
            cost = max(cost, span.end - first.setdefault(span.worker, span.start))
        return Fraction(f"{(cost - self.micro_batches * sum(self.times[:3])) / cost:.4f}")


_TABLE = """
1.5B   2304  24   8  24  18.522 18.086  9.337  0.601  0.2431 0.1585 0.1083 0.1585 0.0433
1.5B   2304  24   8  32  18.513 18.086  9.331  0.626  0.1985 0.1242 0.0837 0.1242 0.0039
1.5B   2304  24   8  64  18.546 18.097  9.321  0.762  0.1240 0.0674 0.0444 0.0674 0.0026
6.2B   4096  32   8  24  29.718 29.444 19.927  0.527  0.2347 0.1323 0.0698 0.1323 0.0029
6.2B   4096  32   8  32  29.802 29.428 19.530  0.577  0.1898 0.1045 0.0559 0.1045 0.0022
6.2B   4096  32   8  64  29.935 29.621 19.388  0.535  0.1091 0.0554 0.0294 0.0554 0.0010
14.6B  5120  40  16  48  11.347 11.248  8.132  0.377  0.2552 0.1397 0.0672 0.1397 0.0066
14.6B  5120  40  16  64  11.307 11.254  8.101  0.379  0.2082 0.1088 0.0516 0.1088 0.0054
28.3B  6144  48  32  96  10.419 10.207  7.715  0.408  0.2646 0.1421 0.0641 0.1421 0.0038
"""
"""Tables 5 and 9, one setting per line, in the order of ``_Setting``."""


def _settings() -> Iterator[_Setting]:
    for line in _TABLE.strip().splitlines():
        model, *sizes = line.split()
        width, heads, workers, micro_batches = map(int, sizes[:4])
        yield _Setting(model, width, heads, workers, micro_batches, [*map(float, sizes[4:8])], sizes[8:])


_PRINTED = ("1F1B", "ZB-H1", "ZB-H2")
_NAMED: tuple[tuple[Callable[[int, int], Schedule], int], ...] = (
    (dapple, 1),
    (zb_h1, 1),
    (zb_h2, 1),
    (zb_v, 2),
    (interleaved_zb, 2),
    (dualpipe_v, 2),
)
"""Schemes with one copy of the model, and their number of stages per worker."""


def rows() -> Iterator[Row]:
    """Zero Bubble's Table 5, all nine settings."""
    for setting in _settings():
        yield from _rows(setting)


def _rows(setting: _Setting) -> Iterator[Row]:
    p, m = setting.workers, setting.micro_batches
    where = f"{setting.model}, p={p}, m={m}"
    rates: list[tuple[Fraction, float, str]] = []
    for build, stages in _NAMED:
        schedule = build(p, m)
        result = simulate(schedule, setting.costs(stages))
        rates.append((setting.rate(result), max(result.peak_bytes or ()), schedule.scheme))
    for name, published, (rate, _, scheme) in zip(_PRINTED, setting.published, rates, strict=False):
        value, measured = Range.of(Fraction(published)), Range.of(rate)
        yield Row(scheme, "bubble rate", where, _SOURCE, name, value, measured)
    for limit, published in zip((1, 2), setting.published[3:], strict=True):
        rate, _, scheme = min(named for named in rates if named[1] <= limit * p * (1 + 1e-9))
        value, measured = Range.of(Fraction(published)), Range.of(rate)
        quantity = f"bubble rate, best within {limit}·p·M_B"
        formula = f"ZB-{limit}p"
        yield Row(scheme, quantity, where, _SOURCE, formula, value, measured, Relation.AT_MOST, ("named",))
