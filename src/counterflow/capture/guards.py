"""Guards of a record: what the forwards of opened modules read of Python, compared before each step.

The recorded run notes which attributes of modules are read. The values of these attributes, the globals and
closures of the functions that ran, the modules of opened modules, their hooks, and the settings of torch are
the guards. An attribute that no opened forward reads is none, so a change of it costs nothing.

Not seen: entries of containers of more than 10,000 entries, single entries of arrays of more than 64 KiB,
objects of C extensions that export no memory, changes of larger tensors by ``tensor.data``, what a weak
reference leads to beyond its attributes, and globals of installed libraries that no user changes between
steps (``walk``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from .contexts import autocast_of
from .fake_model import CONTAINERS, observed_objects
from .python_state import ABSENT, DictEntries, ParameterAttribute, Plain, PythonState, Same, Unknown
from .record_comparison import ContainerComparison
from .tracing_internals import hook_tables, parameter_tables
from .walk import Walk


class Environment(NamedTuple):
    """Settings of torch around the forwards, on which the dtypes in a forward depend.

    Attributes:
        dtype: the default dtype.
        autocast: dtype of autocast; None: it is off.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> Environment:
        """Settings of this thread now, for a device type."""
        return cls(torch.get_default_dtype(), autocast_of(device_type))


class RecordDependencies(NamedTuple):
    """Values that a record depends on.

    Attributes:
        attributes: names that are read of modules, each with the module's path.
        opened: paths of the opened modules.
        objects: names that are read of further objects, each with the object's name.
        has_dtypes: whether dtypes, and numbers made of these, are those of the weights in the recorded run.
    """

    attributes: frozenset[tuple[str, str]]
    opened: frozenset[str]
    objects: frozenset[tuple[str, str]]
    has_dtypes: bool


class Guards(NamedTuple):
    """Guards at one moment.

    Attributes:
        state: values that are read.
        comparison: their fast comparison.
        weights: parameters and buffers of opened modules, by name.
        environment: settings of torch.
    """

    state: PythonState
    comparison: ContainerComparison
    weights: Mapping[str, object]
    environment: Environment

    def unchanged(self, environment: Environment) -> bool:
        """Compare everything with the saved objects, by identity."""
        return environment == self.environment and self.comparison.unchanged()

    def with_values(self, guards: Guards, names: Iterable[str]) -> Guards:
        """These guards with some values of others, so a comparison finds that they differ."""
        for name in names:
            self.state.tokens[name] = guards.state.tokens.get(name, ABSENT)
        self.state.watches.append(Unknown())
        return self._replace(comparison=ContainerComparison(self.state.watches))

    def differences(self, guards: Guards) -> list[str]:
        """Names of what differs from other guards, besides weights."""
        names = self.state.differences(guards.state)
        if self.environment.dtype != guards.environment.dtype:
            names.append("the default dtype")
        if self.environment.autocast != guards.environment.autocast:
            names.append("autocast")
        return names


def guards_of(model: nn.Module, reads: RecordDependencies, environment: Environment) -> Guards:
    """Guards of a record, with the values of now."""
    modules = dict(model.named_modules())
    observed = observed_objects(model)
    walk = Walk(model, observed.values())
    weights = walk.weights
    for path, names in _grouped(reads.attributes).items():
        if path in modules:
            walk.attributes(path, modules[path], names)
        else:
            walk.state.tokens[path] = ABSENT
    for label, names in _grouped(reads.objects).items():
        walk.members(label, observed[label], names)
    for path, module in modules.items():
        outside = path.rpartition(".")[0]
        if path in reads.opened or (isinstance(module, CONTAINERS) and outside in reads.opened):
            walk.children(path, module)
            hook = f"{HOOK}{path!r}" if path else f"{HOOK}the model"
            for table in hook_tables(module):
                walk.state.watches.append(DictEntries(hook, table))
            walk.state.tokens[hook] = Plain(sum(map(len, hook_tables(module))))
            for tensors in parameter_tables(module):
                walk.state.watches.append(DictEntries(f"weights of {path!r}", tensors))
                weights |= {f"{path}.{n}" if path else n: Same(t) for n, t in tensors.items()}
    tables = [vars(of_torch)[name] for name in _GLOBAL_HOOKS]
    for table in tables:
        walk.state.watches.append(DictEntries(f"{HOOK}all modules", table))
    walk.state.tokens[f"{HOOK}all modules"] = Plain(sum(map(len, tables)))
    state = walk.done()
    for name, counts in (("requires_grad", state.asks_for_gradients), ("dtype", reads.has_dtypes)):
        if counts:
            attribute = ParameterAttribute([*model.parameters()], name)
            state.watches.append(attribute)
            state.tokens[attribute.label] = Plain(attribute.values())
    return Guards(state, ContainerComparison(state.watches), weights, environment)


HOOK = "a hook on "
"""Beginning of the names of hooks among a state's values."""

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _grouped(pairs: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for owner, name in sorted(pairs):
        groups.setdefault(owner, []).append(name)
    return groups
