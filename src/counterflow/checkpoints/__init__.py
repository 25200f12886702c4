"""Checkpoints on disk: written by all workers at once, read under any layout.

A checkpoint is a folder ``step-N`` with an index, ``checkpoint.json``, and safetensors files, in which
tensors have the model's own names. torch.distributed.checkpoint plans which worker writes and reads which
part, so scheme, depth, width and sharding may differ when a checkpoint is read.
"""

from typing import TYPE_CHECKING

from counterflow.common.lazy import attributes

if TYPE_CHECKING:
    from .pipelines import load_checkpoint, save_checkpoint
    from .reader import Checkpoint, load_weights
    from .saver import Saver

__all__ = ["Checkpoint", "Saver", "load_checkpoint", "load_weights", "save_checkpoint"]

__getattr__ = attributes(
    __name__,
    {
        "Checkpoint": "reader",
        "Saver": "saver",
        "load_checkpoint": "pipelines",
        "load_weights": "reader",
        "save_checkpoint": "pipelines",
    },
)
