"""Weights and buffers of layers that live on other workers: without memory, and loud when they are used.

Invariant: all but the numbers of a remote tensor is known: its shape, its dtype, whether it is trained. Who
asks for its numbers reads in one sentence where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.torch_private import buffers_of, parameters_of, plain_call, subclassed
from counterflow.errors import ConfigError

_KNOWN = {
    "__repr__",
    "detach",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "stride",
}
"""Methods of a remote tensor that may be called; its properties may be read too."""

_SET = {"grad", "requires_grad"}
"""Properties that may be set."""


class RemoteTensorError(ConfigError):
    """A use of the numbers of a tensor that another worker has."""


class Remote(Tensor):
    """A parameter or a buffer whose numbers another worker has. On the meta device.

    Attributes:
        place: which one it is, where its numbers are, and what to call instead.
    """

    place: str

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> Remote:
        """Make the placeholder of a tensor."""
        meta_tensor = torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
        remote = subclassed(cls, meta_tensor, parameter=isinstance(tensor, nn.Parameter))
        remote.place = place
        return remote

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what is known; everything else asks for the numbers.

        Raises:
            RemoteTensorError: it does.
        """
        del types
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _KNOWN or name == "__get__" or (name == "__set__" and owner in _SET):
            result = plain_call(func, args, kwargs or {})
            return cls.of(result, args[0].place) if type(result) is Tensor and result.is_meta else result
        values = [*args, *(kwargs or {}).values()]
        values += [item for row in values if isinstance(row, (list, tuple)) for item in row]
        raise RemoteTensorError(next(item.place for item in values if isinstance(item, Remote)))


def refuse_remote(index: int, module: nn.Module) -> None:
    """Refuse a layer whose weights went to another worker when an earlier pipeline was made.

    Raises:
        ConfigError: it is one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, Remote):
            raise ConfigError(
                f"{name} of layer {index} ({type(module).__name__}) was left to another worker when an "
                "earlier pipeline was made of this model, which cut it otherwise; make the model anew, and "
                "load that pipeline's state_dict() into it before"
            )


def leave(
    layers: Iterable[tuple[str, nn.Module, Sequence[int]]],
    modules: Iterable[nn.Module],
    local_ids: Collection[int],
    rank: int,
) -> None:
    """Free the weights and buffers of layers that live elsewhere; their use is refused from now on.

    What is on the meta device already stays as it is.

    Args:
        layers: of each its name in messages, the user's module, and the ranks on which it lives.
        modules: the modules of the user's model, which may use a tensor outside of any layer.
        local_ids: by identity, the modules and tensors that live here; these stay wherever they are used.
        rank: this worker's.
    """
    modules = tuple(modules)
    here = {
        id(t)
        for module in modules
        if id(module) in local_ids
        for table in tables(module)
        for t in table.values()
    }
    replaced: dict[int, tuple[Tensor, Remote]] = {}  # the tensors too, so that their ids stay their own
    for called, layer, ranks in layers:
        owners = f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
        for prefix, module in layer.named_modules():
            for name, tensor in () if id(module) in local_ids else _tensors_of(module):
                if tensor.is_meta or id(tensor) in replaced or id(tensor) in local_ids or id(tensor) in here:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                place = (
                    f"{full} of {called} lives on {owners} and not on rank {rank}, "
                    "because a pipeline trains its model: call the pipeline's evaluate() or predict() to run "
                    "the model, and load its state_dict() into a model made anew to have all weights"
                )
                replaced[id(tensor)] = tensor, Remote.of(tensor, place)
    for module in modules if replaced else ():
        for table in tables(module):
            table.update({name: replaced[id(t)][1] for name, t in table.items() if id(t) in replaced})


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables in which a module looks up its own parameters, and its own buffers."""
    return parameters_of(module), buffers_of(module)


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for table in tables(module) for n, t in table.items() if t is not None]
