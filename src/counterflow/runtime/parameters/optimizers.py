"""A stage's optimiser and scheduler, made by the user's functions.

Invariant: what cannot be stepped by a pipeline is refused before the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from counterflow.common.tensors.dtensors import is_dtensor
from counterflow.errors import ConfigError

MakeOptimizer = Callable[[Any], Optimizer]
"""A function of a stage's ``Parameters``."""

MakeScheduler = Callable[[Optimizer], LRScheduler]

_NO_PARAMETERS = "optimizer got an empty parameter list"
"""torch's word for it."""


class Parameters(list[nn.Parameter]):
    """The list of a stage's parameters that the function of an optimiser accepts.

    Args:
        named: name and parameter of each, by the model's own names.

    >>> bias = nn.Parameter(torch.zeros(2))
    >>> found = Parameters([("layer.bias", bias)])
    >>> found[0] is bias, [name for name, _ in found.named]
    (True, ['layer.bias'])
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.named = list(named)
        """Name and parameter of each, as ``model.named_parameters()`` gives them: for groups by name."""
        super().__init__(parameter for _, parameter in self.named)


def optimizer_of(
    stage: int, make: MakeOptimizer, parameters: Sequence[tuple[str, nn.Parameter]]
) -> Optimizer | None:
    """Call ``make`` with a stage's parameters; None if it chooses none of them.

    Raises:
        ConfigError: it is no function, fails, or gives no optimiser that a pipeline can step.
    """
    try:
        optimizer = _call(make, Parameters(parameters), "optimizer", "parameters", stage)
    except ConfigError as error:
        if _NO_PARAMETERS in str(error.__cause__):  # it leaves out what is frozen, say
            return None
        raise
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"optimizer gives a {type(optimizer).__name__} for stage {stage}; let it give a "
            "torch.optim.Optimizer"
        )
    refuse_others(optimizer, {id(parameter) for _, parameter in parameters}, stage)
    _refuse_mixed(optimizer, stage)
    _refuse_sparse(optimizer, stage)
    _refuse_arguments(optimizer, f"the optimizer of stage {stage}", "an optimizer")
    return cast("Optimizer", optimizer)


def scheduler_of(stage: int, make: MakeScheduler, optimizer: Optimizer) -> LRScheduler:
    """Call ``make`` with a stage's optimiser.

    Raises:
        ConfigError: it is no function, fails, or gives no scheduler that a pipeline can step.
    """
    scheduler = _call(make, optimizer, "scheduler", "an optimizer", stage)
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"scheduler gives a {type(scheduler).__name__} for stage {stage}; let it give one of "
            "torch.optim.lr_scheduler"
        )
    _refuse_arguments(scheduler, f"the scheduler of stage {stage}", "a scheduler")
    return cast("LRScheduler", scheduler)


def _call(make: Any, argument: Any, name: str, of: str, stage: int) -> Any:
    if not callable(make):
        got = "None" if make is None else f"a value of class {type(make).__name__}"
        example = "AdamW, lr=0.001" if name == "optimizer" else "StepLR, step_size=10"
        raise ConfigError(
            f"{name} must be callable, got {got}; give a function of {of} that makes one for each stage, as "
            f"functools.partial({example}) is"
        )
    try:
        return make(argument)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} raised {type(error).__name__} for stage {stage}: {error}. It is called once a stage, "
            "with what that stage has: leave out groups of parameters that are empty there"
        ) from error


def home_of(
    slot: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> torch.device:
    """Device of a number that an optimiser saves for a parameter, in a tensor without dimensions.

    It is where it has one by now. Else torch's rule holds: counts of steps are on the host, unless kernels
    read them on the device; what else is kept is beside the parameter.

    Args:
        slot: what it is, by the optimiser's name for it.
        optimizer: whose.
        group: of its options, the parameter's.
        parameter: one of its own.
    """
    known = optimizer.state.get(parameter, {}).get(slot)
    if isinstance(known, Tensor):
        return known.device
    beside_parameter = slot != "step" or group.get("fused") or group.get("capturable")
    return parameter.device if beside_parameter else torch.device("cpu")


def refuse_others(optimizer: Optimizer, known: Container[int], stage: int) -> None:
    """Refuse an optimiser of parameters that are not the stage's: nobody makes gradients for them.

    Raises:
        ConfigError: it has one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer of stage {stage} has a parameter of shape {tuple(parameter.shape)} that "
                    "its function was not given; let it have those alone (the stage's, which may be copies "
                    "of the model's), and make any others parameters of the model"
                )


def _refuse_arguments(stepper: Any, place: str, kind: str) -> None:
    wanted = [
        name
        for name, parameter in inspect.signature(stepper.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:  # as LBFGS and ReduceLROnPlateau do
        raise ConfigError(
            f"{place} ({type(stepper).__name__}) wants {' and '.join(wanted)} at each step, and a pipeline "
            f"has none to give; take {kind} that steps without, or change pipeline.optimizers between steps"
        )


def _refuse_sparse(optimizer: Optimizer, stage: int) -> None:
    if isinstance(optimizer, SparseAdam):
        raise ConfigError(
            f"the optimizer of stage {stage} is a SparseAdam, which takes sparse gradients alone, and a "
            "pipeline adds them to dense ones; take Adagrad, SGD or Adam"
        )


def _refuse_mixed(optimizer: Optimizer, stage: int) -> None:
    for group in optimizer.param_groups:
        kinds = {cast("Any", p).device_mesh if is_dtensor(p) else None for p in group["params"]}
        at_once = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if at_once is not None and len(kinds) > 1:
            raise ConfigError(
                f"the optimizer of stage {stage} has {at_once}=True, and its parameters are plain ones and "
                f"DTensors, or of several meshes; omit {at_once}, or give it groups of each kind"
            )
