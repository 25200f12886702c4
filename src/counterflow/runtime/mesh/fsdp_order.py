"""Collectives of ``fully_shard``, which all positions that share weights have to call in one order.

torch calls them where a layer runs: an all-gather for each module that it wraps, and a reduce-scatter of the
gradients that are there. If a layer runs a module for some samples only, positions with other samples call
others, which mixes up weights of one size, and ends or stops processes at those of several sizes.

Invariant: in the first mini-batch each collective is compared before it is called, so that all positions
refuse it; after that a digest of all of them, with the sums of each mini-batch and before its update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.common.tensors import devices
from counterflow.common.tensors.torch_fsdp import fsdp_groups, intercept_gathers, whole_parameter
from counterflow.common.trees import mapped, tensors_in
from counterflow.errors import ConfigError

_COMPARED = 1000
"""Maximum number of collectives that are compared one by one, in a pipeline that never trains."""

_REMEDY = (
    "since a module that fully_shard wraps is used at some positions only; let it wrap the stage alone, or "
    "modules that all positions use"
)

_PRIME, _MODULUS = 1_000_003, 2**61 - 1
_SUM = 0
"""Number of the end of a mini-batch among the collectives."""


class _Sharding(NamedTuple):
    """Processes that share weights.

    Attributes:
        process_group: those of which each has a shard, or a copy.
        replicas: those that have the same shard; None: there are no others.
    """

    process_group: Any
    replicas: Any


class FsdpOrder:
    """Order of a stage's collectives of FSDP, compared between positions.

    Args:
        stage: number of the stage.
        modules: modules of the stage that FSDP shards, by name.
        sums_each_backward: True if FSDP sums gradients in each backward.

    Attributes:
        groups: groups of parameters that FSDP gathers together, in one order at all positions.
    """

    def __init__(self, stage: int, modules: Mapping[str, Any], *, sums_each_backward: bool) -> None:
        self._stage = stage
        names = {
            id(group): (name, group) for name, module in modules.items() for group in fsdp_groups(module)
        }
        self.groups = [group for _, group in names.values()]
        self._remaining = _COMPARED
        self._shardings = {id(group): _sharding(group) for group in self.groups}
        self._gathers = dict.fromkeys(self._shardings.values(), 0)
        self._sums = dict.fromkeys(self._shardings.values(), 0)
        """Digests of all-gathers, which shards call together, and of sums, which replicas call as well."""
        self._verdicts: list[devices.HostCopy] = []
        for module in modules.values():
            module.register_forward_hook(_attach, prepend=True)
        for number, (name, group) in enumerate(names.values(), 1):
            intercept_gathers(group, partial(self._gather, group, number, name or "its weights"))
            if sums_each_backward:  # a bound method, which torch calls by the group
                sums = partial(self._reduce, group, number, name or "the stage", group.post_backward)
                group.post_backward = sums

    def end_mini_batch(self, used: Mapping[int, Sequence[bool]]) -> dict[int, list[bool]]:
        """Compare the collectives of a mini-batch, and merge what positions used; all positions call it.

        Args:
            used: by the identity of a group, True for each parameter with a gradient here.

        Returns:
            The same, with the parameters that have a gradient at any position.

        Raises:
            ConfigError: positions called other collectives.
        """
        if self._remaining > 0:
            for sharding in self._gathers:
                self._compare(sharding.process_group, sharding, _SUM, self._mixed())
            self._remaining = 0
        self.verify()
        merged: dict[int, list[bool]] = {}
        for sharding, gathers in self._gathers.items():
            sums = self._sums[sharding]
            groups = [group for group in self.groups if self._shardings[id(group)] == sharding]
            flags = [flag for group in groups for flag in used.get(id(group), ())]
            numbers = _numbers([gathers, -gathers, sums, -sums, *flags], groups[0].device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=sharding.process_group)
            if sharding.replicas is not None:
                dist.all_reduce(numbers[2:], dist.ReduceOp.MAX, group=sharding.replicas)
            self._verdicts.append(devices.HostCopy(numbers[:4]))
            if not all(flags):  # else a device's host does not wait for what others used
                self.verify()
                flags = [number > 0 for number in numbers[4:].tolist()]
            at = iter(flags)
            merged |= {
                id(group): [next(at) for _ in used[id(group)]] for group in groups if id(group) in used
            }
        if self.groups and not devices.holds_host(self.groups[0].device):
            self.verify()
        return merged

    def verify(self) -> None:
        """Read the results of comparisons that a device has made by now, or wait for it.

        Raises:
            ConfigError: positions called other collectives.
        """
        verdicts, self._verdicts = self._verdicts, []
        for gathers, inverse_gathers, sums, inverse_sums in (verdict.read() for verdict in verdicts):
            if gathers != -inverse_gathers or sums != -inverse_sums:
                raise ConfigError(self._mixed())

    def _gather(self, group: Any, number: int, name: str) -> None:
        sharding = self._shardings[id(group)]
        refusal = (
            f"stage {self._stage} gathers {name} here, and another position does not or gathers others, "
        )
        if self._remaining > 0:
            self._compare(sharding.process_group, sharding, number, refusal + _REMEDY)
        self._gathers[sharding] = _continued(self._gathers[sharding], number)

    def _reduce(self, group: Any, number: int, name: str, post_backward: Any) -> None:
        parameters = [whole_parameter(parameter) for parameter in group.fsdp_params]
        used = sum(2**place for place, p in enumerate(parameters) if p is not None and p.grad is not None)
        if used and group.reduce_grads:
            number += (len(self.groups) + 1) * used
            sharding = self._shardings[id(group)]
            refusal = (
                f"stage {self._stage} sums other gradients of {name} here than at another position, which "
                "used others of its weights; omit sums_each_backward, so that they are summed once a step"
            )
            for process_group in sharding if self._remaining > 0 else ():
                if process_group is not None:
                    self._compare(process_group, sharding, number, refusal)
            self._sums[sharding] = _continued(self._sums[sharding], number)
        post_backward()

    def _compare(self, process_group: Any, sharding: _Sharding, number: int, refusal: str) -> None:
        self._remaining -= 1
        device = next(g.device for g in self.groups if self._shardings[id(g)] == sharding)
        numbers = _numbers([number % _MODULUS], device)
        rows = [torch.empty_like(numbers) for _ in range(process_group.size())]
        dist.all_gather(rows, numbers, group=process_group)
        if len(set(torch.cat(rows).tolist())) > 1:
            raise ConfigError(refusal)

    def _mixed(self) -> str:
        return (
            f"stage {self._stage} gathers weights in another order at another position, or others, {_REMEDY}"
        )


def _attach(module: Any, inputs: object, output: Any) -> Any:
    """Attach an output without a gradient to a weight, so that FSDP gathers in its backward, as elsewhere.

    A layer that used none of its weights has such an output if its input has no gradient.
    """
    del inputs
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors_in(output)):
        return output
    weights = [whole_parameter(p) for group in fsdp_groups(module) for p in group.fsdp_params]
    weight = next((weight for weight in weights if weight is not None and weight.requires_grad), None)
    return output if weight is None else mapped(partial(_attached, weight), output)


def _attached(weight: Tensor, tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return cast("Tensor", _Attached.apply(tensor, weight))  # type: ignore[no-untyped-call]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, weight: Any) -> Tensor:
        del ctx, weight
        return cast("Tensor", tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        return None, None


def _continued(digest: int, number: int) -> int:
    return (digest * _PRIME + number) % _MODULUS


def _sharding(group: Any) -> _Sharding:
    names = "shard_process_group", "replicate_process_group"
    groups = [getattr(group.mesh_info, name, None) for name in names]
    return _Sharding(*groups) if groups[0] is not None else _Sharding(groups[1], None)


def _numbers(values: Sequence[int], device: torch.device) -> Tensor:
    pinned = devices.holds_host(device)  # else the host would wait for the device
    numbers = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return numbers.to(device, non_blocking=True)
