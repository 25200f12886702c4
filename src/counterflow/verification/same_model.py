"""Comparison of a model with the list of its layers, before anything is trained.

Model and layers run once each on the same inputs, in copies of their own, from the same random state:
outputs, loss, gradients and buffers are compared, and inputs and outputs of each module that both call.

Invariant: nothing of the user's changes. Workers, stages and schedules play no role.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.capture.layer import CapturedLayer
from counterflow.capture.model_layers import layers_of
from counterflow.common.mappings import register_mapping_classes
from counterflow.errors import ConfigError
from counterflow.runtime.mini_batch.loss_output import LossFunction
from counterflow.runtime.stages.skip_links import stage_skips
from counterflow.verification.diagnosis.comparison import difference
from counterflow.verification.diagnosis.tolerances import MODELS, coarsest

from .copies import ModelComparison, run_layers, run_model
from .trace import ModuleTrace, first_parting, place_of

RunModel = Callable[[Any, Any], Any]
"""A user's function of the model and the inputs that returns the output that the last layer returns."""


@dataclass(frozen=True, slots=True)
class SameModel:
    """Result of comparing a list of layers with the model it was made from.

    Errors are the largest differences relative to the largest value.

    Attributes:
        ok: whether the layers are the model.
        differences: each difference in a sentence.
        first_difference: where the layers first differ from the model; empty if they do not.
        output_error: error of outputs; infinite if they have other shapes, or a layer fails.
        loss_error: error of the loss, or of the weighted sum of the outputs if no loss was given.
        gradient_error: largest error of the parameters' gradients.
        gradients: the parameters whose gradients differ, by name, each with its error.
        missing_modules: names of modules that the model calls, but of which the layers call no part.
        missing_parameters: names of the model's parameters that no layer has.
        extra_parameters: parameters of layers that are not the model's.
        dtype: dtype of the computation: float64, or the coarsest of inputs and outputs of modules.
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

    Both run forward and backward, in copies, in float64 if they can, and do the same in it: on all samples
    and, without ``run``, on two smaller numbers of them that are no multiples of what automatic layers were
    found with. The modules that both call show the first layer that differs. Modules run in their current
    modes. Every random draw begins at the same state: model and layers may draw in another order. It needs
    the memory of two copies of the model, and of inputs and outputs of all modules, in float64. A difference
    of less than 1e-6 of the largest value (in float32 1e-4, in bfloat16 0.05) counts as rounding.

    Args:
        model: the whole model, as it is trained in one process.
        layers: layers as ``Pipeline`` accepts them: a list of modules or an ``nn.Sequential``, made of the
            model's modules. For ``list_layers``, call it: ``same_model(model, list_layers(model), ...)``.
        inputs: inputs of both as one argument, as in ``Pipeline.step``.
        loss: function of output and targets that returns the loss, as in ``Pipeline``; None: the sum of all
            floating-point outputs, each element with a random weight.
        targets: targets of ``loss``.
        kwargs: keyword arguments of the model and of the first layer.
        run: function that calls the model, if its inputs or outputs differ from those of the layers: ``lambda
            model, inputs: model(*inputs).logits``. Default: ``model(inputs, **kwargs)``, or, if ``cf.layers``
            found the layers, as they call it.
        check: whether to raise if they differ.

    Returns:
        The result; with ``check`` only if the layers are the model.

    Raises:
        ConfigError: the layers are not the model (with ``check``); a pipeline does not accept ``layers``; the
            model cannot be copied, is on the meta device, or fails itself on these inputs.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> same_model(model, list(model), torch.ones(4, 2)).ok
    True
    >>> same_model(model, [model[0], model[2]], torch.ones(4, 2), check=False).missing_modules
    ('1',)
    """
    listed = layers_of(layers)
    stage_skips(listed, (0, len(listed)))
    register_mapping_classes((inputs, targets, kwargs))
    call = listed[0].call if isinstance(listed[0], CapturedLayer) else None
    subject = ModelComparison(
        model, listed, inputs, targets, None if kwargs is None else dict(kwargs), loss, run, call
    )
    subject.refuse_meta()
    result = _compare(subject, *_run_both(subject))
    for samples, fewer in _fewer_samples(subject) if result.ok and run is None else ():
        try:
            runs = _run_both(fewer)
        except ConfigError:  # the model needs more samples
            continue
        smaller = _compare(fewer, *runs)
        if not smaller.ok:
            texts = tuple(f"with {samples} samples: {text}" for text in smaller.differences)
            result = replace(smaller, differences=texts)
            break
    if check and not result.ok:
        raise ConfigError(
            f"the {len(listed)} layers are not the {type(model).__name__}: "
            f"{'; '.join(result.differences[:4])}"
        )
    return result


def _fewer_samples(subject: ModelComparison) -> Iterator[tuple[int, ModelComparison]]:
    trees = (subject.inputs, subject.kwargs, subject.targets)
    leaves = [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor) and leaf.dim()]
    count = max((leaf.shape[0] for leaf in leaves), default=0)
    if any(leaf.shape[0] != count for leaf in leaves):
        return
    example = 0
    if isinstance(subject.layers[0], CapturedLayer):
        example = subject.layers[0].samples or 0
    sizes = [size for size in (count - 1, (count + 1) // 2, count // 3) if 0 < size < count]
    if example > 1:
        sizes = [size for size in sizes if size % example]
    for size in list(dict.fromkeys(sizes))[:2]:
        cut = partial(_first_rows, size)
        inputs, kwargs, targets = pytree.tree_map_only(Tensor, cut, trees)
        yield size, replace(subject, inputs=inputs, kwargs=kwargs, targets=targets)


def _first_rows(size: int, tensor: Tensor) -> Tensor:
    return tensor[:size] if tensor.dim() else tensor


def _run_both(subject: ModelComparison) -> tuple[ModuleTrace, ModuleTrace]:
    fixed = any(isinstance(layer, CapturedLayer) and not layer.follows_dtype for layer in subject.layers)
    for doubled in (False,) if fixed else (True, False):
        with warnings.catch_warnings():
            if doubled:
                warnings.simplefilter("ignore")  # warnings that only float64 causes
            model_trace = run_model(subject, doubled=doubled)
            layer_trace = model_trace if model_trace.failure else run_layers(subject, doubled=doubled)
        if not layer_trace.failure:
            break
    if model_trace.failure:
        raise ConfigError(
            f"{model_trace.failure}: the layers cannot be compared with it; call the model with inputs that "
            "it accepts"
        ) from model_trace.error
    return model_trace, layer_trace


def _compare(subject: ModelComparison, model_trace: ModuleTrace, layer_trace: ModuleTrace) -> SameModel:
    dtype = coarsest((model_trace.dtype, layer_trace.dtype))
    limit = MODELS.of(dtype)
    floor = _noise(model_trace, dtype)
    output_error = difference(model_trace.output, layer_trace.output)
    loss_error = difference(model_trace.loss, layer_trace.loss)
    errors = {
        name: difference(model_trace.gradients.get(name), layer_trace.gradients.get(name), floor)
        for name in model_trace.gradients | layer_trace.gradients
    }
    gradients = {name: error for name, error in errors.items() if not error <= limit}
    missing_modules = _missing_modules(subject, model_trace, layer_trace)
    missing, extra = _missing_parameters(subject), _extra_parameters(subject)
    structure = _structure(missing_modules, [name for name, trains in missing.items() if trains], extra)
    gradient_error = max(errors.values(), default=0.0)
    if layer_trace.failure:
        output_error = loss_error = gradient_error = math.inf
        first, numbers = layer_trace.failure, []
    else:
        numbers = [
            *_outputs(model_trace, layer_trace, output_error, limit),
            *([] if loss_error <= limit else [f"the loss differs by {_size(loss_error)}"]),
            *_gradients(gradients),
            *_left_over(model_trace, layer_trace, limit),
        ]
        first = ""
        if numbers:
            first = first_parting(subject.layers, model_trace, layer_trace, limit) or _parting_backwards(
                subject, gradients
            )
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
    sentences = []
    if modules:
        sentences.append(f"the layers never call {_listed(modules)}, which the model calls")
    if parameters:
        sentences.append(f"no layer has the model's {_listed(parameters)}, which would never be trained")
    if extra:
        more = f"; and {len(extra) - 2} more such" if len(extra) > 2 else ""
        sentences.append("; ".join(extra[:2]) + more)
    return sentences


def _outputs(model_trace: ModuleTrace, layer_trace: ModuleTrace, error: float, limit: float) -> list[str]:
    if error <= limit:
        return []
    paths, layer_paths = (_paths(run.output) for run in (model_trace, layer_trace))
    if paths == layer_paths:
        return [f"outputs differ by {_size(error)}"]
    texts = []
    if paths - layer_paths:
        texts.append(f"the model alone returns {', '.join(sorted(paths - layer_paths))}")
    if layer_paths - paths:
        texts.append(f"the layers alone return {', '.join(sorted(layer_paths - paths))}")
    return [
        f"outputs have another structure: {', '.join(texts)}; return the same, or call the model with `run=` "
        "so that it does"
    ]


def _paths(output: Any) -> set[str]:
    return {pytree.keystr(path) or "one value" for path, _ in pytree.tree_flatten_with_path(output)[0]}


def _gradients(errors: Mapping[str, float]) -> list[str]:
    if not errors:
        return []
    worst = max(errors, key=errors.__getitem__)
    return [f"gradients differ of {_listed(list(errors))} (largest: {worst!r}, by {_size(errors[worst])})"]


def _left_over(model_trace: ModuleTrace, layer_trace: ModuleTrace, limit: float) -> list[str]:
    sentences = []
    buffers = [
        name
        for name, value in model_trace.buffers.items()
        if not difference(value, layer_trace.buffers.get(name)) <= limit
    ]
    if buffers:
        sentences.append(f"the layers leave different values in the buffers {_listed(buffers)}")
    if model_trace.draws != layer_trace.draws:
        sentences.append(
            f"the model draws random numbers {sum(model_trace.draws.values())} times but the layers "
            f"{sum(layer_trace.draws.values())} times, or of other shapes"
        )
    return sentences


def _noise(run: ModuleTrace, dtype: torch.dtype) -> float:
    """Size below which a gradient is rounding compared with the others, as that of a bias before a batch
    norm.
    """
    largest = max((float(g.abs().max()) for g in run.gradients.values() if g.numel()), default=0.0)
    return largest * min(1.0, 1e3 * torch.finfo(dtype).eps / MODELS.of(dtype))


def _missing_modules(
    subject: ModelComparison, model_trace: ModuleTrace, layer_trace: ModuleTrace
) -> list[str]:
    """Modules that the model calls and no layer does, the outermost ones, except those that return their
    input. Layers that were found by ``cf.layers`` may compute with a module's weights and not call it.
    """
    captured = [layer for layer in subject.layers if isinstance(layer, CapturedLayer)]
    used = {id(weight) for layer in captured for weight in layer.parameters()}
    called, expected = ({call.name for call in run.calls} for run in (layer_trace, model_trace))
    names = {id(module): name for name, module in subject.model.named_modules()}
    missing: list[str] = []
    for name, module in subject.model.named_modules():  # a module precedes its parts
        if name == "" or name in called or name not in expected or isinstance(module, nn.Identity):
            continue
        if any(names[id(part)] in called for part in module.modules()):
            continue
        if any(id(weight) in used for weight in module.parameters()):
            continue
        if not any(name.startswith(f"{outer}.") for outer in missing):
            missing.append(name)
    return missing


def _missing_parameters(subject: ModelComparison) -> dict[str, bool]:
    listed = {id(parameter) for layer in subject.layers for parameter in layer.parameters()}
    return {
        name: parameter.requires_grad
        for name, parameter in subject.model.named_parameters()
        if id(parameter) not in listed
    }


def _extra_parameters(subject: ModelComparison) -> list[str]:
    model_parameters = dict(subject.model.named_parameters())
    known = {id(parameter) for parameter in model_parameters.values()}
    sentences: list[str] = []
    for index, layer in enumerate(subject.layers):
        for name, parameter in layer.named_parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            text = f"{name} of {place_of(subject.layers, index)} is not a parameter of the model"
            twin = next((n for n, p in model_parameters.items() if _equal(p, parameter)), None)
            if twin is not None:
                text += f", but a copy of its {twin!r} that would be trained on its own"
            sentences.append(text)
    return sentences


def _equal(first: nn.Parameter, second: nn.Parameter) -> bool:
    return (
        first.shape == second.shape
        and first.device == second.device
        and torch.equal(first.detach(), second.detach())
    )


def _parting_backwards(subject: ModelComparison, gradients: Mapping[str, float]) -> str:
    model_parameters = dict(subject.model.named_parameters())
    differing = {id(model_parameters[name]) for name in gradients if name in model_parameters}
    for index in reversed(range(len(subject.layers))):
        if any(id(parameter) in differing for parameter in subject.layers[index].parameters()):
            return (
                f"{place_of(subject.layers, index)}: the last one with a gradient that differs, although all "
                "outputs of modules are equal; look there for a detach, or a copy of a weight"
            )
    return ""


def _size(error: float) -> str:
    if math.isinf(error):
        return "another shape, dtype or value that is not a number, or by a missing one"
    return f"{error:.2g} of the largest value"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
