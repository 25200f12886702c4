"""Diagnosis of optimisers: whether the update of one parameter depends on others.

A user's function makes an optimiser of a few small parameters, and makes some steps with chosen gradients:
together, and of some of these parameters alone, or beside others' other gradients. If results of the same
parameters differ, the optimiser computes a number from all parameters (a global norm, Prodigy's distance).

Invariant: neither the parameters at hand, nor their optimiser, nor the state of torch's generators differ
after it. What the user's function does beside making an optimiser, it does twice more, or three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow.common.numbering import number_of
from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError

from .comparison import equal_within_units
from .tolerances import OPTIONS, UPDATE_UNITS

_STEPS = 3
_PARAMETERS = 4
_VALUES = 4
"""Maximum number of parameters that are probed, and of their values along each dimension."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class _Run(NamedTuple):
    results: list[Any]
    drew: bool  # random numbers were drawn


class OptimizerCouplingDiagnosis:
    """Diagnosis of a user's function on small copies of some of a stage's parameters.

    Args:
        make: function of parameters, by name, to an optimiser.
        optimizer: optimiser that it made for the stage.
        parameters: parameters of the stage, by name, in the order in which the function received them.
    """

    def __init__(
        self,
        make: Callable[[NamedParameters], Optimizer],
        optimizer: Optimizer,
        parameters: NamedParameters,
    ) -> None:
        self._make = make
        places = {id(parameter): place for place, (_, parameter) in enumerate(parameters)}
        chosen: list[int] = []
        for group in optimizer.param_groups:
            trained = [places[id(p)] for p in group["params"] if p.requires_grad]
            chosen += dict.fromkeys(trained[:1] + trained[-1:])
        chosen = chosen[:_PARAMETERS]
        self._probed = dict(parameters[place] for place in sorted(chosen))
        if len(chosen) == 1:  # add a second one of the same shape
            name, parameter = parameters[chosen[0]]
            self._probed[f"{name.partition('.')[0]}.{name}"] = parameter
        compared = {parameters[place][0] for place in chosen[1::2]}
        self._compared = compared or set([*self._probed][1:])

    def run(self, random_state: AbstractContextManager[Any]) -> bool | None:
        """Return True if the update of a parameter depends on others; None: nothing can be decided.

        Args:
            random_state: context that preserves the random state.
        """
        names = [*self._probed]
        if len(names) < 2:
            return None
        with random_state:
            try:
                reference = self._run(names)
                differs = self._differ(reference, names)
                # Only an optimiser that repeats its result allows a conclusion.
                if differs and self._same(reference, self._run(names)):
                    return True
            except Exception:
                return None
        return None if differs else False

    def _differ(self, reference: _Run, names: list[str]) -> bool:
        if not reference.drew:
            try:
                return not self._same(reference, self._run([n for n in names if n in self._compared]))
            except Exception:  # noqa: S110 - it needs a parameter that is missing: compare with all
                pass
        return not self._same(reference, self._run(names, variant=2))

    def _run(self, names: Collection[str], *, variant: int = 1) -> _Run:
        torch.default_generator.manual_seed(0)
        copies = {name: _small(self._probed[name], number) for number, name in self._numbered(names)}
        optimizer = self._make([*copies.items()])
        identities = {id(copy) for copy in copies.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in identities for parameter in group["params"]):
                raise ConfigError("the optimizer is of other parameters than its function was given")
            if "capturable" in group:
                group["capturable"] = False  # copies are on the CPU
        before = torch.default_generator.get_state()
        for step in range(_STEPS):
            for number, name in self._numbered(names):
                size = 1 if name in self._compared else 10 * variant
                copies[name].grad = _random(copies[name], size, step + 1, number, size)
            optimizer.step()
        compared = (copies[name] for name in self._probed if name in self._compared)
        results = [value for copy in compared for value in _results(optimizer, copy)]
        return _Run(results, not torch.equal(before, torch.default_generator.get_state()))

    def _numbered(self, names: Collection[str]) -> list[tuple[int, str]]:
        return [(number, name) for number, name in enumerate(self._probed) if name in names]

    @staticmethod
    def _same(result: _Run, reference: _Run) -> bool:
        return len(result.results) == len(reference.results) and all(
            map(_close, result.results, reference.results)
        )


def chooses_by_place(
    make: Callable[[NamedParameters], Optimizer],
    optimizer: Optimizer,
    parameters: NamedParameters,
    random_state: AbstractContextManager[Any],
) -> bool:
    """Return True if a function leaves out parameters by their place in their list.

    A function that leaves out none is not called again.

    Args:
        make: function of parameters, by name, to an optimizer.
        optimizer: optimizer that it made of the parameters.
        parameters: the parameters by name.
        random_state: context that preserves the random state.
    """
    chosen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if len(parameters) < 2 or all(id(parameter) in chosen for _, parameter in parameters):
        return False
    copies = [(name, _small(parameter, number)) for number, (name, parameter) in enumerate(parameters)]
    results = []
    with random_state:
        for order in (copies, [*copies[1:], copies[0]]):
            try:
                groups = make(order).param_groups
            except Exception:
                return False
            results.append({id(parameter) for group in groups for parameter in group["params"]})
    return results[0] != results[1]


def _small(parameter: nn.Parameter, number: int) -> nn.Parameter:
    copy = nn.Parameter(0.1 * _random(parameter, 1, 0, number))
    if not is_dtensor(parameter):
        vars(copy).update(vars(parameter))
    return copy


def _random(like: Tensor, size: int, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(number_of(*seed))
    shape = [min(count, _VALUES) for count in like.shape]
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (size * numbers).to(like.dtype)


def _results(optimizer: Optimizer, copy: nn.Parameter) -> list[Any]:
    group = next(group for group in optimizer.param_groups if any(p is copy for p in group["params"]))
    options = [value for key, value in group.items() if key != "params" and isinstance(value, float | Tensor)]
    state = [value for value in optimizer.state.get(copy, {}).values() if isinstance(value, Tensor)]
    return [copy.detach(), *state, *options]


def _close(value: Any, reference: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(reference, Tensor):
        return equal_within_units(value, reference, UPDATE_UNITS)
    return type(value) is type(reference) and (
        value == reference or math.isclose(value, reference, rel_tol=OPTIONS)
    )
