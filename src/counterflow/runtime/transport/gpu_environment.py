"""Environment variables that CUDA and NCCL read at start: set to suitable values, with warnings.

Invariant: a user's choice stays, as far as it can be distinguished from a value that torch's launcher set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch

_LOG = logging.getLogger(__name__)

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

_MOST_QUEUES = 32
"""Queues between host and GPU: each stream has its own while there are enough; CUDA's default is 8. A worker
has a stream for its ops, one for each direction to each neighbour, and one for each group of sums."""

_FEW_QUEUES = 8

_CLEAN_UP = "2"
"""A group whose peer is gone ends its operations but not the process: the watch reports it."""

_TEAR_DOWN = "1"
"""Value that torch's elastic agent sets in each worker's environment if its own environment has none."""


def of_workers() -> dict[str, str]:
    """The variables for workers that are started here."""
    return {ERRORS: os.environ.get(ERRORS, _CLEAN_UP), QUEUES: os.environ.get(QUEUES, str(_MOST_QUEUES))}


def before_cuda() -> None:
    """Choose the number of queues between host and GPU, which CUDA reads as it begins."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault(QUEUES, str(_MOST_QUEUES))


def before_nccl() -> None:
    """Choose how NCCL's groups handle errors, which they read as they are made; warn of variables that block
    hosts.
    """
    value = os.environ.get(ERRORS)
    if value is None:
        os.environ[ERRORS] = _CLEAN_UP
    elif value == _TEAR_DOWN and "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ[ERRORS] = _CLEAN_UP
        _LOG.info(
            "%s=%s, as torchrun sets it, would end this process before it reports an error: it is %s now",
            ERRORS,
            value,
            _CLEAN_UP,
        )
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":  # one worker a machine
        for warning in _warnings():
            _LOG.warning(warning)


def _warnings() -> Iterator[str]:
    queues = os.environ.get(QUEUES)
    if queues is None or (queues.isdigit() and int(queues) < _FEW_QUEUES):
        state = "is not set, and CUDA began before it could be" if queues is None else f"is {queues}"
        yield (
            f"{QUEUES} {state}: ops may wait behind messages in the few queues that streams share; set it to "
            f"{_MOST_QUEUES} before the program starts"
        )
    if launches_hold():
        yield (
            "CUDA_LAUNCH_BLOCKING is set: each op and message holds its worker until it is over, and "
            "gradients are summed at the end of a step; unset it to train at full speed"
        )
    if _is_set("TORCH_NCCL_BLOCKING_WAIT"):
        yield (
            "TORCH_NCCL_BLOCKING_WAIT is set: hosts wait for messages instead of their GPUs; unset it to "
            "train at full speed"
        )


def launches_hold() -> bool:
    """True if each launch on a GPU blocks its host until the launched work is done."""
    return _is_set("CUDA_LAUNCH_BLOCKING")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")
