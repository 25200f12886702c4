"""The main job: from a config to a trained model. Importing this does not import torch."""

from typing import TYPE_CHECKING, Any

from .callbacks import Callback, TensorBoard
from .config import RunConfig
from .load import load_config

if TYPE_CHECKING:
    from counterflow.checkpoints import load_weights

__all__ = ["Callback", "RunConfig", "TensorBoard", "load_config", "load_weights"]


def __getattr__(name: str) -> Any:
    """The name that needs torch, imported when it is first used."""
    if name == "load_weights":
        from counterflow.checkpoints import load_weights  # noqa: PLC0415

        return load_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
