"""What a training goes on from, on disk: written by all workers at once, read under any layout.

A checkpoint is a folder ``step-N`` with an index, ``checkpoint.json``, and safetensors files, in which
tensors have the model's own names. Who writes which part is planned by torch.distributed.checkpoint; so is
who reads which, so that scheme, depth, width and sharding may be others then.
"""

from typing import TYPE_CHECKING

from counterflow.lazy import attributes

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
