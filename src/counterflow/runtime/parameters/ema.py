"""An exponential moving average of a worker's trained weights, stage by stage.

Invariant: who keeps a weight's optimiser state keeps its average: all holders, or with ZeRO stage 1 its
owner. All holders' averages are equal, bit for bit: they are made of equal weights by the same steps. A
weight that was never trained is its own average; one that was frozen later goes on in its average, as in
torch's. Averages of weights in bfloat16 and float16 are in float32, and of a weight that is cut over further
dimensions of the mesh an average is of this rank's part.

Source: the recurrence of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``, whose first
update copies the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from counterflow.common.tensors.dtensors import like, local, part_of
from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.errors import ConfigError

from ..transport.base import Transport


class AveragedWeight(NamedTuple):
    """A weight and its average, which has the shape of what this rank holds of it."""

    parameter: nn.Parameter
    average: Tensor

    @property
    def laid_out(self) -> Tensor:
        """The average, laid out as the weight is."""
        return like(self.parameter, self.average)


class ExponentialAverage:
    """One worker's averages; they begin as the weights are.

    Args:
        decay: what an average keeps of itself at an update, from 0 to less than 1.
        updated: of a stage, what this worker's optimiser updates, by name.
        stages: this worker's.

    Raises:
        ConfigError: there is no such decay.
    """

    def __init__(
        self,
        decay: float,
        updated: Callable[[int], Sequence[tuple[str, nn.Parameter]]],
        stages: Iterable[int],
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(
                f"an average of weights with a decay of {decay}; give a number from 0 to less than 1"
            )
        self._updated = updated
        self._into = get_ema_multi_avg_fn(decay)
        self._averages: dict[int, dict[str, AveragedWeight]] = {stage: {} for stage in stages}
        self._updates: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Let the averages be the weights as they are."""
        for stage in self._averages:
            self._averages[stage], self._updates[stage] = {}, 0
        self.renew()

    def renew(self) -> None:
        """Keep averages of what is trained by now, or was: the average of a frozen weight still nears it."""
        for stage, averages in self._averages.items():
            self._averages[stage] = {
                name: averages[name] if name in averages else AveragedWeight(parameter, _begun(parameter))
                for name, parameter in self._updated(stage)
                if parameter.requires_grad or name in averages
            }

    def frozen(self) -> set[str]:
        """Names of weights that have an average and are not trained by now."""
        return {
            name
            for averages in self._averages.values()
            for name, weight in averages.items()
            if not weight.parameter.requires_grad
        }

    def of(self, stage: int) -> dict[str, AveragedWeight]:
        """Averages of a stage, by the weights' first names."""
        return self._averages[stage]

    def updates(self, stage: int) -> int:
        """The updates of a stage that are in its averages."""
        return self._updates[stage]

    def update(self, stage: int) -> None:
        """Take in what an update made of a stage's weights."""
        for averages, weights in _lists(self._averages[stage].values()):
            if self._updates[stage]:
                self._into(averages, weights, self._updates[stage])
            else:
                torch._foreach_copy_(averages, weights)
        self._updates[stage] += 1

    def refuse_missing(self, is_saved: Callable[[str], bool]) -> None:
        """Refuse averages that lack that of a trained weight.

        Args:
            is_saved: a weight's name to whether its average is there.

        Raises:
            ConfigError: one is missing.
        """
        for stage in self._averages:
            for name, parameter in self._updated(stage):
                if parameter.requires_grad and not is_saved(name):
                    raise ConfigError(
                        f"the training state has no average of {name!r}; call ema() after it is loaded"
                    )

    def load(self, average_of: Callable[[str], Tensor | None], updates: int) -> None:
        """Take averages that were saved, also of weights that are frozen by now.

        Args:
            average_of: a weight's name to its whole average, or laid out as the weight; None: a frozen one
                has none.
            updates: what is in them.
        """
        for stage, averages in self._averages.items():
            for name, parameter in self._updated(stage):
                saved = average_of(name)
                if saved is None:
                    averages.pop(name, None)
                    continue
                if name not in averages:
                    averages[name] = AveragedWeight(parameter, _begun(parameter))
                averages[name].average.copy_(part_of(saved, parameter))
            self._updates[stage] = updates

    def show(self) -> None:
        """Let the weights be their averages."""
        with torch.no_grad():
            for averages in self._averages.values():
                for parameter, average in averages.values():
                    local(parameter).detach().copy_(average)

    @property
    def nbytes(self) -> int:
        """Size of all averages in bytes."""
        return sum(average.nbytes for averages in self._averages.values() for _, average in averages.values())


class WeightEma:
    """Average of a worker's weights from the call that requests one.

    Args:
        stages: numbers of the worker's stages.
        updated: parameters that this worker's optimiser updates for a stage, by name.
        transport: transport to the other workers.

    Attributes:
        average: the average; None: not requested.
    """

    def __init__(
        self,
        stages: Iterable[int],
        updated: Callable[[int], Sequence[tuple[str, nn.Parameter]]],
        transport: Transport,
    ) -> None:
        self._stages, self._updated, self._transport = list(stages), updated, transport
        self.average: ExponentialAverage | None = None

    def start(self, decay: float) -> None:
        """Start the average at the weights as they are; all workers call it.

        Raises:
            ConfigError: the decay is out of range, or workers give different ones.
        """
        for rank, (rank_decay,) in enumerate(self._transport.gather([decay])):
            if rank_decay != decay:
                raise ConfigError(
                    f"rank {self._transport.rank} averages weights with a decay of {decay}, rank {rank} with "
                    f"{rank_decay}; all workers make the same calls"
                )
        self.average = ExponentialAverage(decay, self._updated, self._stages)


def _begun(parameter: nn.Parameter) -> Tensor:
    return local(parameter).detach().to(sum_dtype(parameter.dtype), copy=True)


def _lists(pairs: Iterable[AveragedWeight]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    same: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for parameter, average in pairs:
        weight = local(parameter).detach()
        if weight.dtype is not average.dtype:  # of lower precision: by itself, as it is cast
            yield [average], [weight.to(average.dtype)]
            continue
        averages, weights = same[average.dtype, average.device]
        averages.append(average)
        weights.append(weight)
    yield from same.values()
