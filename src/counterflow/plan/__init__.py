"""Which plan: clusters and costs as data, predictions, the search, device placement."""

from __future__ import annotations

from .cluster import AllReduce, Cluster, Link, NodeKind
from .device_placement import Arrangement
from .model import LayerSkip, LayerTie, Model
from .predict import Predictor, predict
from .prediction import Configuration, Parts, Prediction, WorkerMemory
from .profile import Division, LayerProfile, Profile
from .stages import Cutting

__all__ = [
    "AllReduce",
    "Arrangement",
    "Cluster",
    "Configuration",
    "Cutting",
    "Division",
    "LayerProfile",
    "LayerSkip",
    "LayerTie",
    "Link",
    "Model",
    "NodeKind",
    "Parts",
    "Prediction",
    "Predictor",
    "Profile",
    "WorkerMemory",
    "predict",
]
