"""What Counterflow uses of torch that has no public name, and what replaces each.

Invariant: nothing else in Counterflow names what is private in torch, but for the notes below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

# torch's own checkpoint and elastic code reach the store of the default group the same way.
from torch.distributed.distributed_c10d import Store, _get_default_store


def default_store() -> Store:
    """The store by which the default process group met."""
    return _get_default_store()


def abort(group: ProcessGroup) -> None:
    """Abort a group's communicators, from any thread.

    ``ProcessGroup.abort`` is public from 2.7 on; before, the backend has it.
    """
    call: Any = getattr(group, "abort", None)
    if call is None:
        call = group._get_backend(torch.device("cuda")).abort  # noqa: SLF001
    call()
