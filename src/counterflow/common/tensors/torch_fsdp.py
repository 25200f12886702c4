"""Private names of FSDP2 (``fully_shard``) that Counterflow uses, with a replacement for each ("Without: …").

It continues ``torch_private.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn


def fsdp_groups(module: Any) -> list[Any]:
    """The parameters that FSDP gathers together, as torch's own pipelining reaches them.

    ``mesh/fsdp_sum.py`` gathers and sums them by these groups. Without: ``set_requires_gradient_sync(True)``
    before a step's last backward, so that split backwards are refused.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001
    group = state._fsdp_param_group  # noqa: SLF001 - before torch 2.13 there is one, or none
    return [] if group is None else [group]


def whole_parameter(parameter: Any) -> nn.Parameter | None:
    """Full parameter that FSDP computes with in place of a shard, a permanent object; None: not gathered yet.

    Without: find it in the module between ``unshard`` and ``reshard``.
    """
    return cast("nn.Parameter | None", getattr(parameter, "_unsharded_param", None))


def end_fsdp_backward(module: Any) -> None:
    """Let a device's stream wait for the sums that FSDP began, as torch's own pipelining does.

    Only a root module does anything. Without: a backward that sums.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    if state._is_root:  # noqa: SLF001
        state._root_post_backward_final_callback()  # noqa: SLF001


def intercept_gathers(group: Any, before: Callable[[], None]) -> None:
    """Let ``before`` run before each all-gather of a group of parameters.

    ``FSDPModule.set_custom_all_gather`` sets it for all groups of a module, and cannot be read. Without: it,
    and the user sets none.
    """
    group._all_gather_comm = _Intercepted(group._all_gather_comm, before)  # noqa: SLF001


class _Intercepted:
    """An all-gather of FSDP's, with its allocation."""

    def __init__(self, gather: Any, before: Callable[[], None]) -> None:
        self._gather, self._before = gather, before
        self.allocate = gather.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._gather(*args, **kwargs)


def shard_placements(mesh: Any) -> Callable[[int], Any]:
    """Results of fully_shard's ``shard_placement_fn`` that shard parameters over a mesh of their own.

    Without: a call of ``fully_shard`` for a module that has no other parameters.

    Returns:
        Function of the dimension that is sharded.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: PLC0415 - see dtensors.py
    from torch.distributed.tensor import Shard  # noqa: PLC0415 - see dtensors.py

    info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)  # the same one for all parameters of a group
    return lambda dim: _fsdp_common.ShardPlacementResult(Shard(dim), info)
