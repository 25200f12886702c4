"""A model against the list of its layers, before anything is trained.

Model and layers run once each on the same inputs, in copies of their own, from the same random state:
outputs, loss, gradients and buffers are compared, and what each module that both call takes and returns.

Invariant: nothing of the user's changes. Nothing here knows of workers, stages or schedules.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from counterflow.capture.layer import CapturedLayer
from counterflow.errors import ConfigError
from counterflow.runtime.messages.mappings import know
from counterflow.runtime.mini_batch.losses import LossFunction
from counterflow.runtime.stages.layers import layers_of
from counterflow.runtime.stages.skips import stage_skips

from .calls import Run, first_parting, place_of
from .copies import Given, run_layers, run_model
from .nearness import difference, tolerance

RunModel = Callable[[Any, Any], Any]
"""A user's function: the model and the inputs to the output that the last layer returns."""


@dataclass(frozen=True, slots=True)
class SameModel:
    """How a list of layers compares with the model it was made from.

    Errors are largest differences relative to the largest value of what is compared.

    Attributes:
        ok: whether the layers are the model.
        differences: each difference that was found, in a sentence.
        first_difference: where the layers part from the model; empty if they do not.
        output_error: of outputs; infinite where they have other shapes, or a layer fails.
        loss_error: of the loss; of the weighted sum of the outputs where no loss was given.
        gradient_error: the largest of the parameters' gradients.
        gradients: the parameters whose gradients differ, by name, each with its error.
        missing_modules: the names of modules that the model calls, while the layers call no part of them.
        missing_parameters: the names of the model's parameters that no layer has.
        extra_parameters: the layers' parameters that are not the model's.
        dtype: in which all was computed: float64, or the coarsest that modules take and return.
    """

    ok: bool
    differences: tuple[str, ...]
    first_difference: str
    output_error: float
    loss_error: float
    gradient_error: float
    gradients: Mapping[str, float]
    missing_modules: tuple[str, ...]
    missing_parameters: tuple[str, ...]
    extra_parameters: tuple[str, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        errors = (
            f"output {self.output_error:.1e}, loss {self.loss_error:.1e}, gradients {self.gradient_error:.1e}"
        )
        lines = [
            f"SameModel: {'the same' if self.ok else 'NOT the same'} "
            f"({errors}; {str(self.dtype).removeprefix('torch.')})"
        ]
        lines += [f"  {text}" for text in self.differences[:4]]
        if len(self.differences) > 4:
            lines.append(f"  and {len(self.differences) - 4} more differences")
        return "\n".join(lines)


def same_model(
    model: nn.Module,
    layers: nn.Sequential | Sequence[nn.Module],
    inputs: Any = None,
    loss: LossFunction | None = None,
    targets: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    run: RunModel | None = None,
    check: bool = True,
) -> SameModel:
    """Compare a model with the list of its layers on one batch, before anything is trained.

    Both run once, forward and backward, in copies, in float64 if they can. The modules that both call tell
    which layer is the first that differs. Modules run in the modes they are in. Every random draw begins at
    the same state: model and layers may draw in another order. It takes the memory of two copies of the
    model, and of what all modules take and return, in float64. A difference of less than 1e-6 of the largest
    value (in float32 1e-4, in bfloat16 0.05) counts as rounding.

    Args:
        model: the whole model, as it is trained in one process.
        layers: what ``Pipeline`` takes: a list of modules or an ``nn.Sequential``, made of the model's
            modules. For ``list_layers``, call it: ``same_model(model, list_layers(model), ...)``.
        inputs: of both, as ``Pipeline.step`` takes them: one argument.
        loss: output and targets to the loss, as ``Pipeline`` takes it; None: the sum of all floating-point
            outputs, each element with a weight drawn for it.
        targets: of ``loss``.
        kwargs: keyword arguments of the model and of the first layer.
        run: calls the model where its forward takes or returns something else than the layers do:
            ``lambda model, inputs: model(*inputs).logits``. By default ``model(inputs, **kwargs)``, and where
            ``cf.layers`` found the layers, as they call it.
        check: whether to raise if they differ.

    Returns:
        What was found; with ``check`` only where the layers are the model.

    Raises:
        ConfigError: the layers are not the model (with ``check``); ``layers`` are none that a pipeline takes;
            the model cannot be copied, is on the meta device, or fails itself on these inputs.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> same_model(model, list(model), torch.ones(4, 2)).ok
    True
    >>> same_model(model, [model[0], model[2]], torch.ones(4, 2), check=False).missing_modules
    ('1',)
    """
    listed = layers_of(layers)
    stage_skips(listed, (0, len(listed)))
    know((inputs, targets, kwargs))
    call = listed[0].call if isinstance(listed[0], CapturedLayer) else None
    given = Given(model, listed, inputs, targets, None if kwargs is None else dict(kwargs), loss, run, call)
    given.refuse_meta()
    found = _compare(given, *_run_both(given))
    if check and not found.ok:
        raise ConfigError(
            f"the {len(listed)} layers are not the {type(model).__name__}: {'; '.join(found.differences[:4])}"
        )
    return found


def _run_both(given: Given) -> tuple[Run, Run]:
    """The model's run and the layers', in float64 if both can.

    Raises:
        ConfigError: the model cannot run.
    """
    for doubled in (True, False):
        with warnings.catch_warnings():
            if doubled:
                warnings.simplefilter("ignore")  # of what only float64 warns about
            ours = run_model(given, doubled=doubled)
            theirs = ours if ours.failure else run_layers(given, doubled=doubled)
        if not theirs.failure:
            break
    if ours.failure:
        raise ConfigError(f"{ours.failure}: there is nothing to compare the layers with") from ours.error
    return ours, theirs


def _compare(given: Given, ours: Run, theirs: Run) -> SameModel:
    """All differences; ``ours`` is the model's run, ``theirs`` that of the layers."""
    dtype = max(ours.dtype, theirs.dtype, key=lambda each: torch.finfo(each).eps)
    limit = tolerance(dtype)
    floor = _noise(ours, dtype)
    output_error = difference(ours.output, theirs.output)
    loss_error = difference(ours.loss, theirs.loss)
    errors = {
        name: difference(ours.gradients.get(name), theirs.gradients.get(name), floor)
        for name in ours.gradients | theirs.gradients
    }
    gradients = {name: error for name, error in errors.items() if not error <= limit}
    missing_modules = _missing_modules(given, ours, theirs)
    missing, extra = _missing_parameters(given), _extra_parameters(given)
    structure = _structure(missing_modules, [name for name, trains in missing.items() if trains], extra)
    gradient_error = max(errors.values(), default=0.0)
    if theirs.failure:
        output_error = loss_error = gradient_error = math.inf
        first, numbers = theirs.failure, []
    else:
        numbers = [
            *_outputs(ours, theirs, output_error, limit),
            *([] if loss_error <= limit else [f"the loss differs by {_size(loss_error)}"]),
            *_gradients(gradients),
            *_left_over(ours, theirs, limit),
        ]
        first = ""
        if numbers:
            first = first_parting(given.layers, ours, theirs, limit) or _parting_backwards(given, gradients)
    differences = tuple(text for text in (first, *structure, *numbers) if text)
    return SameModel(
        ok=not differences,
        differences=differences,
        first_difference=first,
        output_error=output_error,
        loss_error=loss_error,
        gradient_error=gradient_error,
        gradients=gradients,
        missing_modules=tuple(missing_modules),
        missing_parameters=tuple(name if trains else f"{name} (frozen)" for name, trains in missing.items()),
        extra_parameters=tuple(extra),
        dtype=dtype,
    )


def _structure(modules: Sequence[str], parameters: Sequence[str], extra: Sequence[str]) -> list[str]:
    """What one has and the other lacks, in sentences."""
    found = []
    if modules:
        found.append(f"the layers never call {_listed(modules)}, which the model calls")
    if parameters:
        found.append(f"no layer has the model's {_listed(parameters)}, which would never be trained")
    if extra:
        more = f"; and {len(extra) - 2} more such" if len(extra) > 2 else ""
        found.append("; ".join(extra[:2]) + more)
    return found


def _outputs(ours: Run, theirs: Run, error: float, limit: float) -> list[str]:
    """How outputs differ, in a sentence."""
    if error <= limit:
        return []
    paths, others = (_paths(run.output) for run in (ours, theirs))
    if paths == others:
        return [f"outputs differ by {_size(error)}"]
    texts = []
    if paths - others:
        texts.append(f"the model alone returns {', '.join(sorted(paths - others))}")
    if others - paths:
        texts.append(f"the layers alone return {', '.join(sorted(others - paths))}")
    return [
        f"outputs have another structure: {', '.join(texts)}; return the same, or call the model with `run=` "
        "so that it does"
    ]


def _paths(output: Any) -> set[str]:
    """Where an output has its values, as one writes it."""
    return {pytree.keystr(path) or "one value" for path, _ in pytree.tree_flatten_with_path(output)[0]}


def _gradients(errors: Mapping[str, float]) -> list[str]:
    """Which gradients differ, in a sentence; ``errors`` are those of the ones that do."""
    if not errors:
        return []
    worst = max(errors, key=errors.__getitem__)
    return [f"gradients differ of {_listed(list(errors))} (largest: {worst!r}, by {_size(errors[worst])})"]


def _left_over(ours: Run, theirs: Run, limit: float) -> list[str]:
    """What else the runs leave or use differently: buffers, random numbers; in sentences."""
    found = []
    buffers = [
        name
        for name, value in ours.buffers.items()
        if not difference(value, theirs.buffers.get(name)) <= limit
    ]
    if buffers:
        found.append(f"the layers leave other values in the buffers {_listed(buffers)}")
    if ours.draws != theirs.draws:
        found.append(
            f"the model draws random numbers {sum(ours.draws.values())} times and the layers "
            f"{sum(theirs.draws.values())} times, or of other shapes"
        )
    return found


def _noise(run: Run, dtype: torch.dtype) -> float:
    """The size below which a gradient is rounding beside the others, as of a bias before a batch norm."""
    largest = max((float(g.abs().max()) for g in run.gradients.values() if g.numel()), default=0.0)
    return largest * min(1.0, 1e3 * torch.finfo(dtype).eps / tolerance(dtype))


def _missing_modules(given: Given, ours: Run, theirs: Run) -> list[str]:
    """What the model calls and no layer does, the outermost ones; not what returns just what it takes."""
    called, expected = ({call.name for call in run.calls} for run in (theirs, ours))
    names = {id(module): name for name, module in given.model.named_modules()}
    missing: list[str] = []
    for name, module in given.model.named_modules():  # a module comes before its parts
        if name == "" or name in called or name not in expected or isinstance(module, nn.Identity):
            continue
        if any(names[id(part)] in called for part in module.modules()):
            continue
        if not any(name.startswith(f"{outer}.") for outer in missing):
            missing.append(name)
    return missing


def _missing_parameters(given: Given) -> dict[str, bool]:
    """The model's parameters that no layer has, and whether each is trained."""
    listed = {id(parameter) for layer in given.layers for parameter in layer.parameters()}
    return {
        name: parameter.requires_grad
        for name, parameter in given.model.named_parameters()
        if id(parameter) not in listed
    }


def _extra_parameters(given: Given) -> list[str]:
    """The layers' parameters that are not the model's, each in a sentence."""
    own = dict(given.model.named_parameters())
    known = {id(parameter) for parameter in own.values()}
    found: list[str] = []
    for index, layer in enumerate(given.layers):
        for name, parameter in layer.named_parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            text = f"{name} of {place_of(given.layers, index)} is no parameter of the model"
            twin = next((n for n, p in own.items() if _equal(p, parameter)), None)
            if twin is not None:
                text += f", but a copy of its {twin!r} that would be trained on its own"
            found.append(text)
    return found


def _equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    return (
        one.shape == other.shape and one.device == other.device and torch.equal(one.detach(), other.detach())
    )


def _parting_backwards(given: Given, gradients: Mapping[str, float]) -> str:
    """Where gradients part though all that modules return is the same."""
    own = dict(given.model.named_parameters())
    differing = {id(own[name]) for name in gradients if name in own}
    for index in reversed(range(len(given.layers))):
        if any(id(parameter) in differing for parameter in given.layers[index].parameters()):
            return (
                f"{place_of(given.layers, index)}: the last one with a gradient that differs, while what "
                "modules return is the same; look there for a detach, or a copy of a weight"
            )
    return ""


def _size(error: float) -> str:
    if math.isinf(error):
        return "more than numbers tell (another shape, dtype or value that is no number, or none)"
    return f"{error:.2g} of the largest value"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
