"""State of optimisers and schedulers that belongs to no weight, saved with the weights of each group.

Another cut of the model, or other owners of its weights, make other groups. A scheduler has lists with an
entry for each, such as ``max_lrs`` of a cyclic one, and so have the schedulers in it. So a weight
is saved with the entries of its group, of which the lists for other groups are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterflow.errors import ConfigError

FURTHER = "further_state"
"""Name among a weight's options of what is saved with it beside these."""

_OPTIONS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists of a scheduler that the options of the groups contain."""

_OF_TORCH = frozenset({*_OPTIONS, "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Lists with an entry for each group in torch's schedulers."""

_NESTED = "_schedulers"
"""Name of the list of the states of schedulers in a scheduler's state."""

Place = tuple[Any, ...]
"""Names and numbers that lead to a value in a scheduler's state."""


def has_entry_by_group(name: str, value: object, groups: int) -> bool:
    """Return whether an attribute of a scheduler is a list with an entry for each group.

    >>> has_entry_by_group("max_lrs", [0.1, 0.2], 2), has_entry_by_group("_milestones", [5, 9], 2)
    (True, False)
    """
    is_public = not name.startswith("_") or name in _OPTIONS
    return is_public and isinstance(value, list) and len(value) == groups


def group_lists(
    make: Callable[[Optimizer], LRScheduler], optimizer: Optimizer, scheduler: LRScheduler
) -> frozenset[str]:
    """Names of the lists with an entry for each group in a scheduler's state.

    A list of a user's scheduler may have as many entries as there are groups by chance, milestones for
    example. So the scheduler is made for an optimiser with a group more: a list that stays as long is none.

    Args:
        make: the user's function of an optimiser to a scheduler.
        optimizer: the optimiser.
        scheduler: its scheduler.
    """
    groups = len(optimizer.param_groups)
    names = _names(scheduler, groups) if hasattr(scheduler, "state_dict") else frozenset()
    if names <= _OF_TORCH:
        return names
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    larger = [
        deepcopy(group) | {"params": [nn.Parameter(torch.zeros(1))]} for group in (*options, options[-1])
    ]
    try:
        trial = make(Optimizer(larger, getattr(optimizer, "defaults", {})))
        return names & (_OF_TORCH | _names(trial, groups + 1))
    except Exception:  # the user's function may raise anything, such as that a group has no entry
        return names


def _names(scheduler: LRScheduler, groups: int) -> frozenset[str]:
    return frozenset(place[-1] for place, _ in _lists(scheduler.state_dict(), groups))


def further_state(
    optimizer: Optimizer, scheduler: LRScheduler | None, names: Collection[str]
) -> list[dict[str, Any]]:
    """What is saved with the weights of each group beside its options; empty where these have all.

    Args:
        optimizer: the optimiser.
        scheduler: its scheduler; None: it has none.
        names: ``group_lists`` of the scheduler.
    """
    groups = len(optimizer.param_groups)
    by_group: list[dict[str, Any]] = [{} for _ in range(groups)]
    if scheduler is not None:
        for place, values in _lists(scheduler.state_dict(), groups, names):
            is_function = place[-1] == "lr_lambdas" and not any(values)
            if place[0] not in _OPTIONS and not is_function:
                for group, value in zip(by_group, values, strict=True):
                    group.setdefault("scheduler", {})[_text(place)] = value
    common = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for group in by_group if common else ():
        group["optimizer"] = common
    return by_group


def common_options(saved: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Options of a group, of those that were saved with its weights.

    Args:
        saved: by name of a weight; at least one.

    Raises:
        ConfigError: they differ.
    """
    (first, options), *rest = saved.items()
    for name, of_weight in rest:
        for key in dict.fromkeys([*options, *of_weight]):
            values = options.get(key), of_weight.get(key)
            if not _equal(*values):
                raise ConfigError(
                    f"{first!r} and {name!r} are in one group of the optimizer, and the training state has "
                    f"{key} = {values[0]} of the one and {values[1]} of the other; let optimizer= make the "
                    "groups that the state was saved with"
                )
    return options


def refuse_another_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse options of a group that another class of optimisers has.

    Options that a version of torch added, or that a scheduler did, may be missing or in excess.

    Args:
        optimizer: the optimiser at hand.
        saved: options that were saved with a weight.

    Raises:
        ConfigError: they are such options.
    """
    missing = getattr(optimizer, "defaults", {}).keys() - saved.keys()
    excess = saved.keys() - optimizer.param_groups[0].keys() - {FURTHER}
    if missing and excess:
        raise ConfigError(
            f"the training state has {', '.join(sorted(excess))} of another optimizer, and no "
            f"{', '.join(sorted(missing))} for {type(optimizer).__name__}; give the same optimizer, or load "
            "the weights alone"
        )


def load_common(optimizer: Optimizer, further: Mapping[str, Any]) -> None:
    """Take the optimiser's state that belongs to no weight, of what was saved with a group."""
    optimizer.state.update(deepcopy(further.get("optimizer", {})))


def scheduler_state(
    states: Mapping[int, dict[str, Any]],
    stage: int,
    scheduler: LRScheduler,
    options: Sequence[Mapping[str, Any]],
    names: Collection[str],
) -> dict[str, Any] | None:
    """Return a scheduler's state for the groups at hand: the stage's, or any stage's if the cuts differ.

    Args:
        states: saved states by stage.
        stage: the scheduler's.
        scheduler: the scheduler.
        options: saved options of each group.
        names: ``group_lists`` of the scheduler.

    Returns:
        None: no state fits.
    """
    current = scheduler.state_dict()
    same = [state for number, state in states.items() if number == stage]
    for state in (*same, *states.values()):
        fitting = deepcopy(state)
        if fitting.keys() == {"last_epoch"}:  # of another system; a function of the step needs no more
            fitting = deepcopy(current) | fitting | {"_step_count": fitting["last_epoch"] + 1}
        if fitting.keys() <= current.keys() <= fitting.keys() | {"lr_lambdas"} and _fill(
            fitting, current, options, names
        ):
            return fitting
    return None


def _fill(
    fitting: dict[str, Any],
    current: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
    names: Collection[str],
) -> bool:
    # False: the state does not fit.
    groups = len(options)
    entries = [group.get(FURTHER, {}).get("scheduler", {}) for group in options]
    try:
        for place, values in _lists(current, groups, names):
            *path, name = place
            owner: Any = fitting
            for part in path:
                owner = owner[part]
            text = _text(place)
            saved = owner.get(name)
            if not path and name in _OPTIONS and all(_OPTIONS[name] in group for group in options):
                owner[name] = [group[_OPTIONS[name]] for group in options]
            elif all(text in entry for entry in entries):
                owner[name] = [entry[text] for entry in entries]
            elif name == "lr_lambdas" and not any(saved or ()):  # functions are not in the state
                owner[name] = values
            elif len(saved) != groups:
                if not all(_equal(value, saved[0]) for value in saved):
                    return False
                owner[name] = saved[:1] * groups
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _lists(
    state: Mapping[str, Any], groups: int, names: Collection[str] | None = None
) -> Iterator[tuple[Place, list[Any]]]:
    for key, value in state.items():
        if key == _NESTED and isinstance(value, Sequence):
            for number, nested in enumerate(value):
                if isinstance(nested, Mapping):
                    lists = _lists(nested, groups, names)
                    yield from (((key, number, *place), values) for place, values in lists)
        elif (names is None or key in names) and has_entry_by_group(key, value, groups):
            yield (key,), value


def _text(place: Iterable[Hashable]) -> str:
    return ".".join(map(str, place))


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first.cpu(), second.cpu())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
