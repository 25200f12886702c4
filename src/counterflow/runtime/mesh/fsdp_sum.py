"""Gradients of what ``fully_shard`` shards: added up whole, and summed over its positions once a step.

FSDP sums when a backward has passed a module. A step has a backward for each micro-batch, and one that is
split makes gradients after that. So FSDP's own sums are off, and the last op of a step that makes gradients
of the stage calls ``sum``. torch's own pipelining does it so, too.

Invariant: between steps no whole gradient is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from counterflow.common.tensors.dtypes import sum_dtype
from counterflow.common.tensors.torch_fsdp import end_fsdp_backward, whole_parameter

from .fsdp_order import FsdpOrder


class FsdpGradientSum:
    """Sum of a stage's gradients once a step.

    Args:
        modules: those of the stage that FSDP shards.
        order: order of their collectives.
    """

    gathers = False
    """Whether backwards have the stage gathered: layers have gradients of more than inputs and outputs."""

    def __init__(self, modules: Sequence[Any], order: FsdpOrder) -> None:
        self._sharded, self._order = modules, order
        self._groups = order.groups
        self._let_sum(sums=False)

    def prepare(self) -> None:
        """After a forward: let gradients be added up in float32 at least, and be rounded once."""
        for group in self._groups:
            for one in group.fsdp_params:
                one.reduce_dtype = None  # else FSDP rounds after each micro-batch; the group still knows it
                whole = whole_parameter(one)
                if whole is not None and whole.requires_grad:
                    wanted = sum_dtype(whole.dtype)
                    if whole.grad_dtype is not wanted:
                        whole.grad_dtype = wanted

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which weights are whole: a backward in it may pass no hook of FSDP's before."""
        sharded = [group for group in self._gathered_groups() if not group.is_unsharded]
        settings = [(group, group.reshard_after_backward) for group in self._groups]
        for group in sharded:
            group.unshard()
            group.wait_for_unshard()
        for group, _ in settings:
            group.reshard_after_backward = False
        try:
            yield
        finally:
            for group, before in settings:
                group.reshard_after_backward = before
            for group in sharded:
                group.reshard()

    def sum(self) -> None:
        """Sum what was added up, in the dtype that the policy says; all positions call it.

        A parameter that only other positions used counts as zeros here: all sum the same parameters. One that
        no position used has no gradient.

        Raises:
            ConfigError: positions gathered weights in different orders.
        """
        self._let_sum(sums=True)
        used = self._order.end_mini_batch(
            {
                id(group): [_has_gradient(parameter) for parameter in group.fsdp_params]
                for group in self._groups
            }
        )
        for group in self._groups:
            flags = used[id(group)]
            if any(flags) and any(whole_parameter(parameter) is None for parameter in group.fsdp_params):
                group.unshard()
                group.wait_for_unshard()
        for group in self._gathered_groups():
            dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype
            for parameter, is_used in zip(group.fsdp_params, used[id(group)], strict=True):
                full = whole_parameter(parameter)
                if full is not None:
                    gradient = _pop_gradient(parameter, full)
                    if gradient is None and is_used:
                        gradient = torch.zeros_like(full, dtype=dtype or sum_dtype(full.dtype))
                    rounds = gradient is not None and dtype is not None
                    parameter.unsharded_accumulated_grad = gradient.to(dtype) if rounds else gradient
                    del gradient
            group.post_backward()
        self._let_sum(sums=False)
        for module in self._sharded:
            end_fsdp_backward(module)

    def discard(self) -> None:
        """Drop gradients that were added up beside a step, and whole weights."""
        for group in self._gathered_groups():
            for parameter in group.fsdp_params:
                full = whole_parameter(parameter)
                if full is not None:
                    _pop_gradient(parameter, full)
            group.reshard()
        for module in self._sharded:
            end_fsdp_backward(module)

    def _let_sum(self, *, sums: bool) -> None:
        for module in self._sharded:
            module.set_requires_gradient_sync(sums, recurse=False)

    def _gathered_groups(self) -> list[Any]:
        return [
            group for group in self._groups if any(whole_parameter(p) is not None for p in group.fsdp_params)
        ]


def _has_gradient(parameter: Any) -> bool:
    full = whole_parameter(parameter)
    if full is None:
        return False
    return full.grad is not None or parameter.unsharded_accumulated_grad is not None


def _pop_gradient(one: Any, whole: Any) -> Any:
    gradient, whole.grad = whole.grad, None
    rounded, one.unsharded_accumulated_grad = one.unsharded_accumulated_grad, None
    if gradient is None or rounded is None:
        return rounded if gradient is None else gradient
    return gradient + rounded  # FSDP rounds where a user's own unshard() has set it up anew
