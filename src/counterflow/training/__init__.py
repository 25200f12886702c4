"""The main job: from a config to a trained model. Importing this package does not import torch."""

from .callbacks import Callback, TensorBoard
from .config import RunConfig
from .load import load_config

__all__ = ["Callback", "RunConfig", "TensorBoard", "load_config"]
