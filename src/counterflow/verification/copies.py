"""Runs of copies of a model and its layers, so nothing of the user's changes.

Model, layers and loss function are copied together, so shared parts are shared in the copy. Each run has a
copy of its own, so changes of buffers and attributes do not reach the other run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.api.aux_loss import added_losses
from counterflow.capture.example_call import Call
from counterflow.capture.recording import follow_model
from counterflow.common.trees import mapped
from counterflow.errors import ConfigError
from counterflow.runtime.mini_batch.loss_output import read_loss

from .trace import ModuleTrace, TraceRecorder, copied, place_of


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """A model and its layers that are compared on a batch.

    Attributes:
        model: the whole model.
        layers: its layers.
        inputs: inputs of the model and of the first layer.
        targets: targets of the loss.
        kwargs: keyword arguments; None: none.
        loss: function of output and targets that returns a loss; None: a weighted sum of the outputs.
        run: function that calls the model; None: it is called like the first layer.
        called: how the model is called, if its layers were found automatically.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    inputs: Any
    targets: Any
    kwargs: dict[str, Any] | None
    loss: Any
    run: Callable[[Any, Any], Any] | None
    called: Call | None = None

    def refuse_meta(self) -> None:
        """Refuse modules without values.

        Raises:
            ConfigError: a module is on the meta device.
        """
        if any(tensor.is_meta for tensor in self._tensors()):
            raise ConfigError(
                f"the {type(self.model).__name__} or its layers are on the meta device and have no values "
                "to compare; make a small model of the same kind on a device, and compare that"
            )

    def shared(self) -> set[str]:
        """Names of the model's modules that layers contain too."""
        of_layers = {id(module) for layer in self.layers for module in layer.modules()}
        return {name for name, module in self.model.named_modules() if id(module) in of_layers}

    def gpus(self) -> list[int]:
        """The GPUs in use."""
        leaves = pytree.tree_leaves((self.inputs, self.kwargs, self.targets))
        tensors = [*self._tensors(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})

    def _tensors(self) -> list[Tensor]:
        return [t for m in (self.model, *self.layers) for t in (*m.parameters(), *m.buffers())]


class _Copy:
    def __init__(self, subject: ModelComparison, *, doubled: bool, follows: bool) -> None:
        try:
            self.model, self.layers, self.loss, self._run = copy.deepcopy(
                (subject.model, list(subject.layers), subject.loss, subject.run)
            )
        except Exception as error:
            raise ConfigError(
                f"the {type(subject.model).__name__}, its layers or the loss function cannot be copied "
                f"({type(error).__name__}: {error}); compare before they contain what copy.deepcopy refuses"
            ) from error
        if follows:
            follow_model(self.layers)
        self._called = subject.called
        roots = [self.model, *self.layers, *([self.loss] if isinstance(self.loss, nn.Module) else [])]
        for root in roots if doubled else ():
            root.double()
        self.inputs, self.kwargs, self.targets = _copied_inputs(
            (subject.inputs, subject.kwargs, subject.targets), doubled=doubled
        )
        self.parameters = dict(self.model.named_parameters())
        if isinstance(self.loss, nn.Module):
            self.parameters |= {f"loss_function.{n}": p for n, p in self.loss.named_parameters()}

    def of_model(self) -> Any:
        """The model's output."""
        if self._run is not None:
            return self._run(self.model, self.inputs)
        if self._called is not None:
            return self._called.run(self.model, self.inputs, self.kwargs or {})
        return self.call(self.model)

    def call(self, module: nn.Module) -> Any:
        """Call the model, or the first layer, with the inputs."""
        if self.kwargs is None:
            return module(self.inputs)
        return module(**self.kwargs) if self.inputs is None else module(self.inputs, **self.kwargs)

    def loss_of(self, output: Any) -> Tensor | None:
        """The loss, or the sum of all outputs with random weights; None if no output is a number."""
        if self.loss is not None:
            loss = read_loss(self.loss(output, self.targets))
            return loss.loss if loss.weight is None else loss.loss / loss.weight
        draw = torch.Generator().manual_seed(1)
        total = None
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                value = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                weights = torch.rand(value.shape, generator=draw, dtype=torch.float64) + 0.5
                part = (value.double() * weights.to(value.device)).sum()
                total = part if total is None else total + part
        return total


def run_model(subject: ModelComparison, *, doubled: bool) -> ModuleTrace:
    """Run a copy of the model."""
    name = f"the {type(subject.model).__name__} itself"
    return _trace(subject, lambda copies, _: copies.of_model(), name, doubled=doubled)


def run_layers(subject: ModelComparison, *, doubled: bool) -> ModuleTrace:
    """Run copies of the layers, one after another."""

    def forward(copies: _Copy, recorder: TraceRecorder) -> Any:
        value = copies.inputs
        for index, layer in enumerate(copies.layers):
            recorder.layer = index
            value = copies.call(layer) if not index else layer(value)
        return value

    return _trace(subject, forward, "the list of layers", doubled=doubled, follows=True)


def _trace(
    subject: ModelComparison,
    forward: Callable[[_Copy, TraceRecorder], Any],
    name: str,
    *,
    doubled: bool,
    follows: bool = False,
) -> ModuleTrace:
    """A run, forward and backward, or its failure; ``follows``: found layers run the model as it is now.

    Raises:
        ConfigError: the copy cannot be made, or the original ran instead.
    """
    run = ModuleTrace()
    copies = _Copy(subject, doubled=doubled, follows=follows)
    recorder = TraceRecorder(
        run, dict(copies.model.named_modules()), subject.shared(), partial(_seed, subject.gpus())
    )
    place = name
    with _random_state_back(subject.gpus()), _originals_unused(subject), torch.enable_grad():
        try:
            with recorder, added_losses() as added:
                output = forward(copies, recorder)
                run.output = copied(output)
                place, recorder.layer, recorder.recording = f"the backward or the loss of {name}", -1, False
                loss = copies.loss_of(output)
                for term in added.values():
                    loss = term if loss is None else loss + term.to(loss)
                if loss is not None and loss.requires_grad:
                    loss.backward()
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            if recorder.layer >= 0:
                place = place_of(subject.layers, recorder.layer)
            text = next(iter(str(error).splitlines()), "")
            run.failure, run.error = f"{place} fails ({type(error).__name__}: {text})", error
            return run
    run.loss = None if loss is None else loss.detach()
    run.gradients = {n: _dense(p.grad) for n, p in copies.parameters.items() if p.grad is not None}
    run.buffers = {name: buffer.detach() for name, buffer in copies.model.named_buffers()}
    return run


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def _copied_inputs(tree: Any, *, doubled: bool) -> Any:
    def copy_tensor(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        if doubled and clone.is_floating_point():
            clone = clone.double()
        return clone.requires_grad_(tensor.requires_grad)

    return mapped(copy_tensor, tree)


def _seed(gpus: Sequence[int]) -> None:
    torch.default_generator.manual_seed(0)
    for gpu in gpus:
        torch.cuda.default_generators[gpu].manual_seed(0)


@contextmanager
def _random_state_back(gpus: Sequence[int]) -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from the old one
    try:
        with torch.random.fork_rng(devices=gpus):
            _seed(gpus)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def _originals_unused(subject: ModelComparison) -> Iterator[None]:
    roots = {
        "the model": subject.model,
        **{place_of(subject.layers, i): m for i, m in enumerate(subject.layers)},
    }

    def refusal(name: str, owner: str) -> ConfigError:
        return ConfigError(
            f"{name!r} of {owner} is used by a function that holds it (a lambda, a closure), so it "
            "cannot be copied with its layer, and its weights belong to no layer; make it an attribute of "
            "the layer"
        )

    def refuse(name: str, owner: str) -> Callable[[Any, Any], None]:
        def hook(module: Any, args: Any) -> None:
            del module, args
            raise refusal(name, owner)

        return hook

    modules = {m: (n, o) for o, root in reversed(roots.items()) for n, m in root.named_modules()}
    parameters = {p: (n, o) for o, root in reversed(roots.items()) for n, p in root.named_parameters()}
    gradients = {parameter: parameter.grad for parameter in parameters}
    hooks = [m.register_forward_pre_hook(refuse(*at), prepend=True) for m, at in modules.items()]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, at in parameters.items():
            if parameter.grad is not None:
                raise refusal(*at)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
