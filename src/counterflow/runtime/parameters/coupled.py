"""Probe of optimisers whose update of one parameter depends on others; a pipeline cannot use them.

A stage has an optimiser of its own, and with ``zero_stage`` each worker has one of the weights that it
updates. One that works out a number from all its parameters (a global norm, Prodigy's distance) then makes
other updates than one optimiser of the whole model does. It is found by trying the user's own function on a
few small parameters, together and apart, with given gradients.

Invariant: neither the parameters at hand, nor their optimiser, nor the state of torch's generators differ
after it. What the user's function does beside making an optimiser, it does twice more, or three times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.tolerances import UPDATE_UNITS

from ..messages.values import number_of
from ..stages.randomness import RandomStreams
from ..transport.base import Transport
from .optimizers import MakeOptimizer, Parameters

_STEPS = 3
_CHOSEN = 4
_VALUES = 4
"""Maximum number of parameters that are tried, and of their values along each dimension."""

_NAMES = ("dadapt", "prodigy", "lamb")
"""In the names of those that are known to, where one cannot be tried."""

_FOR_ITSELF = "take one that looks at each weight for itself (SGD, AdamW, Adafactor, Muon)"


class Coupling:
    """Refuses optimisers that look at several weights at once, where each has some of the model's alone.

    Args:
        make: the user's function of parameters to an optimiser.
        streams: of random draws.
        transport: how to reach the others.
        sharded: whether workers update some of a stage's weights each, and not each stage all of its own.
    """

    def __init__(
        self, make: MakeOptimizer, streams: RandomStreams, transport: Transport, *, sharded: bool
    ) -> None:
        self._make, self._streams, self._transport = make, streams, transport
        self._sharded = sharded
        self._tried: dict[type, bool | None] = {}
        """True if an optimiser couples several parameters, by its class; None: it cannot be tried."""
        self._untried: set[int] = set()
        """Stages whose optimiser could not be, and has made no step."""

    def refuse(
        self,
        optimizers: Mapping[int, Optimizer],
        optimized: Callable[[int], Sequence[tuple[str, nn.Parameter]]],
    ) -> None:
        """Refuse an optimiser that looks at all of its weights at once, if the model has several optimisers.

        All workers call it.

        Args:
            optimizers: by stage.
            optimized: what a stage's is made of, by name.

        Raises:
            ConfigError: it does.
        """
        trained = [s for s in optimizers if any(p.requires_grad for _, p in optimized(s))]
        rows = self._transport.gather([min(trained, default=math.inf), max(trained, default=-math.inf)])
        if not self._sharded and min(row[0] for row in rows) >= max(row[1] for row in rows):
            return
        for stage in trained:
            optimizer = optimizers[stage]
            kind = type(optimizer)
            if kind not in self._tried:
                trial = Trial(self._make, optimizer, optimized(stage))
                self._tried[kind] = trial.coupled(self._streams.kept())
                if self._tried[kind] is None:
                    self._tried[kind] = known_coupled(optimizer) or None
            if self._tried[kind]:
                raise error(optimizer, stage, sharded=self._sharded)
            if self._tried[kind] is None:
                self._untried.add(stage)

    def step(self, stage: int, optimizer: Optimizer) -> None:
        """A stage's step; the first one of an optimiser that could not be tried is looked at.

        Raises:
            ConfigError: it changed options of its groups, which it found from all parameters.
        """
        before = options_of(optimizer) if stage in self._untried else None
        optimizer.step()
        if before is not None:
            refuse_changed(optimizer, before, stage)
            self._untried.discard(stage)


class _Tried(NamedTuple):
    """Results of the compared parameters; ``drew``: random numbers were drawn."""

    results: list[Any]
    drew: bool


class Trial:
    """A user's function, tried on small copies of some of a stage's parameters.

    Args:
        make: the function.
        optimizer: what it made for the stage.
        parameters: the stage's, by name, in the order in which the function was given them.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        optimizer: Optimizer,
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        self._make = make
        places = {id(parameter): place for place, (_, parameter) in enumerate(parameters)}
        chosen: list[int] = []
        for group in optimizer.param_groups:
            trained = [places[id(p)] for p in group["params"] if p.requires_grad]
            chosen += dict.fromkeys(trained[:1] + trained[-1:])
        chosen = chosen[:_CHOSEN]
        self._uncompared = set(chosen[0::2])
        self._probed = dict(parameters[place] for place in sorted(chosen))
        if len(chosen) == 1:  # beside one more of its kind
            name, parameter = parameters[chosen[0]]
            self._probed[f"{name.partition('.')[0]}.{name}"] = parameter
        compared = {parameters[place][0] for place in chosen[1::2]}
        self._compared = compared or set([*self._probed][1:])

    def coupled(self, random_state: AbstractContextManager[Any]) -> bool | None:
        """Return True if an update depends on parameters beside its own; None: that cannot be tried.

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

    def _differ(self, reference: _Tried, names: list[str]) -> bool:
        if not reference.drew:
            try:
                return not self._same(reference, self._run([n for n in names if n in self._compared]))
            except Exception:  # noqa: S110 - it wants a parameter that is not there: beside others
                pass
        return not self._same(reference, self._run(names, variant=2))

    def _run(self, names: Collection[str], *, variant: int = 1) -> _Tried:
        """Make some steps on copies of parameters; ``variant`` selects gradients of those not compared."""
        torch.default_generator.manual_seed(0)
        copies = {name: _small(self._probed[name], number) for number, name in self._numbered(names)}
        optimizer = self._make(Parameters(copies.items()))
        identities = {id(copy) for copy in copies.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in identities for parameter in group["params"]):
                raise ConfigError("the optimizer is of other parameters than its function was given")
            if "capturable" in group:
                group["capturable"] = False  # copies are on the CPU
        before = torch.default_generator.get_state()
        for step in range(_STEPS):
            for number, name in self._numbered(names):
                which = 1 if name in self._compared else 10 * variant
                copies[name].grad = _drawn(copies[name], which, step + 1, number, which)
            optimizer.step()
        compared = (copies[name] for name in self._probed if name in self._compared)
        results = [value for copy in compared for value in _results(optimizer, copy)]
        return _Tried(results, not torch.equal(before, torch.default_generator.get_state()))

    def _numbered(self, names: Collection[str]) -> list[tuple[int, str]]:
        return [(number, name) for number, name in enumerate(self._probed) if name in names]

    @staticmethod
    def _same(result: _Tried, reference: _Tried) -> bool:
        return len(result.results) == len(reference.results) and all(
            map(_close, result.results, reference.results)
        )


def _small(parameter: nn.Parameter, number: int) -> nn.Parameter:
    """One of the same kind, with whatever the user has noted at it."""
    copy = nn.Parameter(0.1 * _drawn(parameter, 1, 0, number))
    if not is_dtensor(parameter):
        vars(copy).update(vars(parameter))
    return copy


def _drawn(like: Tensor, size: int, *seed: int) -> Tensor:
    """Numbers of a tensor's kind on the CPU, a few of each of its dimensions."""
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
    if not (isinstance(value, Tensor) and isinstance(reference, Tensor)):
        return type(value) is type(reference) and (
            value == reference or math.isclose(value, reference, rel_tol=1e-6)
        )
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    exact = torch.complex128 if value.is_complex() else torch.float64
    number, expected = value.detach().to(exact), reference.detach().to(exact)
    size = float(number.abs().max()) if number.numel() else 0.0
    units = torch.finfo(value.dtype).eps * (size if math.isfinite(size) else 0.0)
    return torch.allclose(number, expected, rtol=0.0, atol=UPDATE_UNITS * units, equal_nan=True)


# -- where one cannot be tried


def known_coupled(optimizer: Optimizer) -> bool:
    """True if an optimiser is known to compute numbers from all parameters."""
    return any(part in type(optimizer).__name__.lower() for part in _NAMES)


def options_of(optimizer: Optimizer) -> list[dict[str, float]]:
    """The numbers among the options of its groups."""
    return [
        {key: float(value) for key, value in group.items() if isinstance(value, float | Tensor)}
        for group in optimizer.param_groups
    ]


def refuse_changed(optimizer: Optimizer, before: list[dict[str, float]], stage: int) -> None:
    """Refuse an optimiser that changed its groups' options in a step: it found them from all parameters.

    Raises:
        ConfigError: it did.
    """
    for then, now in zip(before, options_of(optimizer), strict=True):
        changed = sorted(key for key in now if now[key] != then.get(key))
        if changed:
            raise ConfigError(
                f"the optimizer of stage {stage}, a {type(optimizer).__name__}, changed {changed[0]!r} of a "
                "group in its step, as those do that look at all parameters together, and it has some of the "
                f"model's alone; {_FOR_ITSELF}"
            )


def error(optimizer: Optimizer, stage: int, *, sharded: bool) -> ConfigError:
    """Error of an optimiser that looks at several weights at once.

    Args:
        optimizer: that does.
        stage: whose it is.
        sharded: whether workers update some of a stage's weights each, and not each stage all of its own.
    """
    why = "zero_stage = 1 lets each worker update some of them" if sharded else "each stage has its own"
    return ConfigError(
        f"the optimizer of stage {stage}, a {type(optimizer).__name__}, updates a weight otherwise when it "
        f"has others beside it, so that it has to be one for the whole model, and {why}; {_FOR_ITSELF}, and "
        "let its function go by names (parameters.named), not by places in its list"
    )
