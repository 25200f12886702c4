"""A module that runs a piece of a model's steps.

Invariant: modules, parameters and buffers of a layer are the model's own objects. A layer stores nothing
between forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, takewhile
from string import ascii_lowercase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.carry import Carry
from counterflow.common.probe_flag import PROBING
from counterflow.errors import ConfigError

from .example_call import Call, Example
from .layer_contents import CapturedInput, LayerSteps, held_names
from .placeholders import Around, Member, Ref
from .record import RecordedCall
from .sequence_run import run_sequence, run_step

_NO_FORWARD = nn.Module.forward, nn.Sequential.forward
"""Forwards of modules that only contain others."""


class ModelRecords(Protocol):
    """The records of a model, which its layers share."""

    @property
    def model(self) -> nn.Module | None:
        """The user's model; None once it is gone."""
        ...

    @property
    def closed(self) -> Mapping[str, str]:
        """Modules that could not be traced, and what their forward does."""
        ...

    @property
    def mark(self) -> torch.dtype | None:
        """Dtype that stood for the weights' in the recorded runs; None: their own."""
        ...


class LayerRecords(Protocol):
    """A record of a model in one state, as its layers adopt it.

    Attributes:
        parts: the steps of each layer.
        replaced: modules without weights and buffers that the user has replaced, by name.
        called: modules that the steps call, by path.
    """

    parts: tuple[LayerSteps, ...]
    replaced: Mapping[str, Any]
    called: Mapping[str, nn.Module]

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that are neither parameter nor buffer, by name."""
        ...


class CapturedLayer(nn.Module):
    """An automatic layer: some steps of a model's forward, between two of its modules.

    Its input is the output of the previous layer: a tensor, or a tuple of tensors and sizes. The first layer
    accepts the model's inputs, and the last one returns the model's output.

    Args:
        recording: the records of the model, which layers share.
        number: number of the layer.
        title: first and last module, for messages.
        parts: steps in training and in evaluation.
        tensors: parameters, buffers and constants of the steps, by their names in the model.
        transient: names of the buffers that the model's state does not contain.
        cost: number of operations for the example.

    Raises:
        ConfigError: in a forward, if the mini-batch differs in kind from the example.
    """

    def __init__(
        self,
        recording: ModelRecords,
        number: int,
        title: str,
        parts: tuple[LayerSteps, LayerSteps],
        *,
        tensors: Mapping[str, Tensor],
        transient: Collection[str],
        cost: float,
    ) -> None:
        super().__init__()
        self.title, self.cost = title, cost
        self.recording: ModelRecords | None = recording
        """The records of the model; None: the layer was pickled, and stays as it is."""
        self.follows = False
        """Whether a pipeline lets the layer follow its model: the model's modes then are in the record."""
        self.follows_dtype = recording.mark is not None
        """True if the steps are those of the model for weights of any dtype; False: of the recorded one."""
        self._number, self._parts = number, parts
        self.carries: nn.ModuleList | None = None
        """Carries of positions and of each call of attention; None: layers run on whole sequences only."""
        model = recording.model
        assert model is not None
        self._local: dict[str, str] = {}
        for path in dict.fromkeys(s.module for part in parts for s in part.steps if s.module is not None):
            self._add(path, model.get_submodule(path))
        for name, tensor in tensors.items():
            self._hold(name, tensor, persistent=name not in transient)
        self.class_name = self._class_name(model)
        """Class of the block whose forward calls all the steps; of the first module with weights if there is
        no such block.
        """

    def _add(self, path: str, module: nn.Module) -> None:
        local = self._local[path] = self._unused(path)
        self.add_module(local, module)

    def _hold(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        local = self._local[name] = self._unused(name)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(local, tensor)
        else:
            self.register_buffer(local, tensor, persistent=persistent and not name.startswith("constant "))

    def _unused(self, name: str) -> str:
        name = name.replace(".", "_").replace(" ", "_")
        while hasattr(self, name):
            name += "_"
        return name

    @property
    def call(self) -> Call:
        """Call of the model, and of a first layer."""
        entry = self._parts[0].entry
        assert entry is not None
        return entry.example.call

    def uses(self, name: str) -> bool:
        """Check whether the model's output in training is computed from its keyword argument of that name."""
        return name in self._parts[0].used

    @property
    def structure(self) -> tuple[str, ...]:
        """Names of the classes and functions that the layer calls in training, in order: equal for equal
        blocks.
        """
        called = (
            step.function if step.module is None else type(self.module_at(step.module))
            for step in self._parts[0].steps
        )
        return tuple(getattr(function, "__name__", str(function)) for function in called)

    def _class_name(self, model: nn.Module) -> str:
        steps = self._parts[0].steps
        modules = [self.module_at(step.module) for step in steps if step.module is not None]
        paths = [step.inside.split(".") for step in steps if step.inside]
        names = zip(*paths, strict=False) if len(modules) > 1 and len(paths) == len(steps) else ()
        prefix = [level[0] for level in takewhile(lambda level: len({*level}) == 1, names)]
        if prefix:
            block = model.get_submodule(".".join(prefix))
            if type(block).forward not in _NO_FORWARD:
                return type(block).__name__
        named = [module for module in modules if next(module.parameters(), None) is not None]
        return type(named[0]).__name__ if named else "function"

    @property
    def differentiates(self) -> bool:
        """Check whether the layer takes gradients by ``torch.autograd.grad``."""
        return any(step.function is torch.autograd.grad for part in self._parts for step in part.steps)

    @property
    def samples(self) -> int | None:
        """Number of samples of the example that a first layer was found with; None: it is not known."""
        entry = self._parts[0].entry
        if entry is None:
            return None
        example = entry.example
        pairs = zip(example.leaves, example.free, strict=True)
        sizes = [leaf.shape[dims[0][0]] for leaf, dims in pairs if dims]
        return max(sizes, key=sizes.count, default=None)

    @property
    def closed(self) -> Mapping[str, str]:
        """Modules of the model that could not be looked into, by path, and what their forward does."""
        return {} if self.recording is None else self.recording.closed

    @property
    def model(self) -> nn.Module | None:
        """The model of the steps, if it still exists."""
        return None if self.recording is None else self.recording.model

    @property
    def is_of_model(self) -> bool:
        """Check that the modules are those of the model, and no copies."""
        model, paths = self.model, {step.module for part in self._parts for step in part.steps}
        if model is None:
            return False
        modules = dict(model.named_modules())
        return all(modules.get(path) is self.module_at(path) for path in paths if path is not None)

    @property
    def steps(self) -> tuple[RecordedCall, ...]:
        """Steps of the layer in its current mode."""
        return self._part.steps

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers that the steps use directly, by their names in the model."""
        names = {s.name for step in self.steps for s in step.takes.leaves() if type(s) is Member}
        return {n: getattr(self, self._local[n]) for n in names if not n.startswith("constant ")}

    def module_at(self, path: str) -> nn.Module:
        """The module that the steps call by its path in the model."""
        return self.get_submodule(self._local[path])

    @property
    def _part(self) -> LayerSteps:
        model = None if self.follows else self.model
        training = self.training and (model is None or model.training)
        return self._parts[0] if training else self._parts[1]

    def adopt(self, variant: LayerRecords, slot: int) -> None:
        """Run the steps of another record from now on.

        Args:
            variant: the record.
            slot: its use: 0 for training, 1 for evaluation.
        """
        part = variant.parts[self._number]
        if self.carries is not None and len(self.carries) != self._states_of(part):
            raise ConfigError(
                f"{self.title} now calls attention otherwise than before; make another pipeline"
            )
        self._parts = (part, self._parts[1]) if slot == 0 else (self._parts[0], part)
        device = self._device({})
        for step in part.steps:
            if step.module is not None and step.module not in self._local:
                self._add(step.module, variant.called[step.module])
        for name, replacement in variant.replaced.items():
            if name in self._local and isinstance(replacement, Tensor):
                setattr(self, self._local[name], replacement.to(device))
            elif name in self._local:
                self.add_module(self._local[name], replacement)
        for name in held_names(part):
            if isinstance(variant.constants.get(name), nn.Parameter):
                raise ConfigError(
                    f"layer {self.title} now computes with a parameter that is none of the model's, so no "
                    "optimizer of the pipeline trains it; register it in the model, and make another pipeline"
                )
            if name in variant.constants and name in self._local:
                setattr(self, self._local[name], variant.constants[name].to(device))
            elif name in variant.constants:
                self._hold(name, variant.constants[name].to(device))

    def hold_unused(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Hold a parameter or a buffer that no step takes."""
        self._hold(name, tensor, persistent=persistent)

    def extra_repr(self) -> str:
        """Place of the layer in the model."""
        return self.title

    def add_carries(self) -> None:
        """Add the carries of the layer's state between slices of a sequence, or its tokens.

        Raises:
            ConfigError: the layer has a state that is not known.
        """
        if self.carries is not None:
            return
        counts = set(map(self._states_of, self._parts))
        if len(counts) > 1:
            raise ConfigError(
                f"{self.title} calls attention more often in training than in evaluation, so its state "
                "between slices of a sequence is not known; train whole sequences"
            )
        self.carries = nn.ModuleList(Carry() for _ in range(counts.pop()))

    def _states_of(self, part: LayerSteps) -> int:
        if isinstance(part.sequence, str):
            raise ConfigError(
                "captured layers cannot run on slices of a sequence, or token after token: "
                f"{part.sequence}; train whole sequences, or list layers that hold a cf.Carry"
            )
        return part.sequence.states

    @property
    def on_slices(self) -> bool:
        """Check whether the layer runs slices of a sequence, or token after token."""
        carries: Any = self.carries
        return carries is not None and carries[0].expects_slices

    def forward(self, value: Any = None, **kwargs: Any) -> Any:
        """Output of the steps for the output of the previous layer."""
        if self.on_slices:
            carries: Any = self.carries
            return carries[0]._uncompiled(self._run, value, kwargs, carries)  # noqa: SLF001
        return self._run(value, kwargs, None)

    def _run(self, value: Any, kwargs: Mapping[str, Any], carries: Sequence[Carry] | None) -> Any:
        part = self._part
        sequence = part.sequence if carries is not None else None
        if sequence is not None:
            assert not isinstance(sequence, str)
            part = sequence.part
        if part.entry is not None:
            values = _entered(part.entry, value, kwargs, by_token=sequence is not None)
        else:
            values = dict(zip(part.takes, (value,) if isinstance(value, Tensor) else value, strict=False))
        sizes = {group: values[ref].shape[dim] for group, (ref, dim) in part.sizes.sources.items()}
        if part.sizes.numbers:
            sizes |= dict(zip(part.sizes.numbers, value[len(part.takes) :], strict=True))
        tensors = {name: getattr(self, local) for name, local in self._local.items()}
        around = Around(values, tensors, sizes, self._dtype(part, values, tensors), self._device(values))
        if sequence is not None:
            assert carries is not None
            run_sequence(sequence, around, carries)
        else:
            for step, frees in zip(part.steps, part.frees, strict=True):
                run_step(step, around)
                for ref in frees:
                    values.pop(ref, None)
        if part.output is not None:
            return part.output.filled(around)
        if len(part.gives) == 1 and not part.numbers:
            return values[part.gives[0]]
        return (*(values[ref] for ref in part.gives), *(sizes[group] for group in part.numbers))

    def _dtype(
        self, part: LayerSteps, values: Mapping[Ref, Tensor], tensors: Mapping[str, Any]
    ) -> torch.dtype:
        of = part.dtype_of
        if of is None:
            return torch.get_default_dtype()
        if isinstance(of, Ref):
            return values[of].dtype
        source = tensors.get(of)
        if isinstance(source, nn.Module):
            return next(p.dtype for p in source.parameters() if p.is_floating_point())
        return torch.get_default_dtype() if source is None else source.dtype

    def _device(self, values: Mapping[Ref, Tensor]) -> torch.device:
        tensors = chain(values.values(), self.parameters(), self.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _entered(
    entry: CapturedInput, inputs: Any, kwargs: Mapping[str, Any], *, by_token: bool
) -> dict[Ref, Tensor]:
    example = entry.example
    leaves, spec = pytree.tree_flatten(example.call.bound(inputs, kwargs))
    if spec != example.spec and by_token and isinstance(inputs, Tensor) and not kwargs:
        leaves, spec = _of_tokens(example, inputs), example.spec
    if spec != example.spec:
        raise ConfigError(
            f"the mini-batch has another structure ({_shown(leaves, spec)}) than the example that the "
            f"layers were found with ({_shown(example.leaves, example.spec)}); give an example with this "
            "structure"
        )
    values: dict[Ref, Tensor] = {}
    by_group: dict[int, int] = {}
    for index, (leaf, expected, free) in enumerate(zip(leaves, example.leaves, example.free, strict=True)):
        ref = entry.inputs.get(index)
        if ref is None:
            if type(leaf) is not type(expected) or (leaf != expected):
                raise ConfigError(
                    f"the mini-batch contains {leaf!r} but the example that the layers were found with "
                    "contains "
                    f"{expected!r}, on which the model may depend; find them with an example that contains it"
                )
            continue
        dims = dict(free)
        fits = isinstance(leaf, Tensor) and leaf.dim() == expected.dim()
        for dim, size in enumerate(leaf.shape if fits else ()):
            wanted = by_group.setdefault(dims[dim], size) if dim in dims else expected.shape[dim]
            fits = fits and (size == wanted or (dim in dims and PROBING.get()))
        if not fits:
            shown = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)
            raise ConfigError(
                f"the mini-batch has a tensor of shape {shown} but the example that the layers were found "
                f"with has {_freely(expected, dims)}; find them with an example of these sizes"
            )
        values[ref] = leaf
    return values


def _of_tokens(example: Example, tokens: Tensor) -> list[Any]:
    """Leaves of a call with tokens alone, none of which is padding."""
    _, named = pytree.tree_unflatten(list(range(len(example.leaves))), example.spec)
    leaves = list(example.leaves)
    masks = {named["attention_mask"]} if type(named.get("attention_mask")) is int else set()
    ids = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and n not in masks]
    if len(ids) != 1 or leaves[ids[0]].dtype != tokens.dtype:
        raise ConfigError(
            "the mini-batch is token ids alone, but the example that the layers were found with has further "
            "tensors; find them with an example of token ids, and an attention_mask at most"
        )
    leaves[ids[0]] = tokens
    for n in masks:
        leaves[n] = torch.ones_like(tokens, dtype=leaves[n].dtype)
    return leaves


def _freely(tensor: Tensor, free: Mapping[int, int]) -> str:
    sizes = [
        f"any {ascii_lowercase[free[d] % 26]}" if d in free else str(n) for d, n in enumerate(tensor.shape)
    ]
    return f"({', '.join(sizes)})"


def _shown(leaves: Sequence[Any], spec: pytree.TreeSpec) -> str:
    args, kwargs = pytree.tree_unflatten([type(leaf).__name__ for leaf in leaves], spec)
    return ", ".join([*map(str, args), *(f"{name}={kind}" for name, kind in kwargs.items())])
