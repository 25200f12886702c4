"""Diagnosis of optimisers: whether they update the shards of a weight as they update the whole weight.

A user's function makes an optimiser of a few small weights that are sharded as the stage's are, and one of
the same weights whole; both make some steps with the same gradients. An optimiser that reads a number of a
``DTensor`` on the host (``.item()`` of a norm) reads this position's, and updates each shard otherwise; one
that needs an operation that torch cannot shard fails.

Values differ in size between the shards, so that a norm of a shard is not that of the weight. Matrices are
well conditioned, so that an orthogonalisation in bfloat16 (Muon) depends little on the order of its sums.

Invariant: neither the parameters at hand, nor their optimiser, nor the state of torch's generators differ
after it. All positions of the mesh run it, as operations of the optimiser may communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow.common.numbering import number_of
from counterflow.common.tensors.dtensors import is_dtensor, like, local
from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.common.tensors.torch_private import local_shape_and_offset
from counterflow.errors import ConfigError

from .tolerances import SHARDED_UPDATES

_STEPS = 2
_CASES = 24
"""Maximum number of weights that are probed."""
_VALUES = 3
"""Maximum number of values along a dimension that is not sharded."""
_ROWS = 4
"""Values of a shard along a sharded dimension."""
_UNITS = 4.0
"""Units in the last place of a weight that are rounding."""

_LIKE_ANY = "params", "param_names", "lr", "initial_lr"
"""Options of groups that distinguish no cases."""


class ShardFailure(NamedTuple):
    """Failure of an optimiser at this position; at others it may succeed within the tolerance.

    Attributes:
        name: name of a weight.
        error: torch's error; None: it updates the shards otherwise than the whole weight.
    """

    name: str
    error: Exception | None


class _Result(NamedTuple):
    weights: dict[str, Tensor]
    drew: bool


class OptimizerShardDiagnosis:
    """Diagnosis of a user's function on small weights that are sharded like a stage's.

    Args:
        make: function of parameters, by name, to an optimiser.
        optimizer: optimiser that it made for the stage.
        parameters: parameters of the stage, by name, in the order in which the function received them.
    """

    def __init__(
        self,
        make: Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer],
        optimizer: Optimizer,
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        self._make = make
        names = {id(parameter): name for name, parameter in parameters}
        cases: dict[Any, str] = {}
        for group in optimizer.param_groups:
            options = repr(sorted((key, repr(value)) for key, value in group.items() if key not in _LIKE_ANY))
            for parameter in group["params"]:
                if parameter.requires_grad and is_dtensor(parameter) and not local(parameter).is_meta:
                    layout = parameter.device_mesh, parameter.placements, parameter.dtype, parameter.dim()
                    cases.setdefault((options, *layout), names[id(parameter)])
        probed = {*list(cases.values())[:_CASES]}
        self._probed = {name: parameter for name, parameter in parameters if name in probed}

    def run(self, random_state: AbstractContextManager[Any]) -> ShardFailure | None:
        """Return a weight whose shards are updated otherwise; None: there is none, or nothing can be decided.

        Args:
            random_state: context that preserves the random state.
        """
        if not self._probed:
            return None
        with random_state:
            try:
                reference = self._run(sharded=False)
            except Exception:  # it cannot be tried
                return None
            if reference.drew:
                return None
            try:
                result = self._run(sharded=True)
            except Exception as error:
                return ShardFailure(next(iter(self._probed)), error)
            name = self._first_difference(reference, result)
            # Only an optimiser that repeats its result allows a conclusion.
            if name is None or self._first_difference(reference, self._run(sharded=False)) is not None:
                return None
        return ShardFailure(name, None)

    def _run(self, *, sharded: bool) -> _Result:
        torch.default_generator.manual_seed(0)
        copies: dict[str, nn.Parameter] = {}
        for number, (name, parameter) in enumerate(self._probed.items()):
            values = self._values(parameter, 0.1, 0, number)
            copies[name] = nn.Parameter(_shard(values, parameter) if sharded else values)
            attributes = vars(parameter).items()
            vars(copies[name]).update((key, value) for key, value in attributes if not key.startswith("_"))
        optimizer = self._make([*copies.items()])
        identities = {id(copy) for copy in copies.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in identities for parameter in group["params"]):
                raise ConfigError("the optimizer is of other parameters than its function was given")
        before = torch.default_generator.get_state()
        for step in range(1, _STEPS + 1):
            for number, (name, parameter) in enumerate(self._probed.items()):
                gradient = self._values(parameter, 1.0, step, number)
                copies[name].grad = _shard(gradient, parameter) if sharded else gradient
            optimizer.step()
        drew = not torch.equal(before, torch.default_generator.get_state())
        return _Result({name: copy.detach() for name, copy in copies.items()}, drew)

    def _first_difference(self, reference: _Result, result: _Result) -> str | None:
        for number, (name, parameter) in enumerate(self._probed.items()):
            target, first = reference.weights[name], self._values(parameter, 0.1, 0, number)
            weight = result.weights[name]
            if is_dtensor(weight):
                target, first = _part(target, parameter), _part(first, parameter)
            if not target.numel() or not target.isfinite().all():
                continue
            limit = SHARDED_UPDATES * (target - first).abs().max()
            limit += _UNITS * torch.finfo(target.dtype).eps * target.abs().max()
            if not bool((local(weight) - target).abs().max() <= limit):
                return name
        return None

    @staticmethod
    def _values(parameter: Any, size: float, *seed: int) -> Tensor:
        # Random beside diagonals, which grow along the sharded dimensions.
        shape = [min(count, _VALUES) for count in parameter.shape]
        for dim in range(len(shape)):
            count = _shard_count(parameter, dim)
            shape[dim] = _ROWS * count if count > 1 else shape[dim]
        generator = torch.Generator().manual_seed(number_of(*seed))
        values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        if len(shape) > 1:
            rows, columns = (torch.arange(count, device="cpu") % min(shape[-2:]) for count in shape[-2:])
            values = 0.25 * values + 2.0 * (rows[:, None] == columns)
        for dim in range(len(shape)):
            if _shard_count(parameter, dim) > 1:
                growing = torch.linspace(0.5, 2.0, shape[dim], dtype=torch.float64, device="cpu")
                values *= growing.view([-1 if place == dim else 1 for place in range(len(shape))])
        return (size * values).to(dtype=sum_dtype(parameter.dtype), device=local(parameter).device)


def _shard_count(parameter: Any, dim: int) -> int:
    count = 1
    for place, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if getattr(place, "dim", None) == dim:
            count *= size
    return count


def _part(tensor: Tensor, parameter: Any) -> Tensor:
    layout = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
    shape, offset = local_shape_and_offset(SimpleNamespace(shape=tensor.shape, **layout))
    return tensor[tuple(slice(first, first + size) for size, first in zip(shape, offset, strict=True))]


def _shard(tensor: Tensor, parameter: Any) -> Tensor:
    return like(parameter, _part(tensor, parameter).clone(), tensor)
