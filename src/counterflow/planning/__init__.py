"""Planning: clusters and costs as data, predictions, the search for a plan, device placement."""

from __future__ import annotations

from .cost.device_placement import Arrangement
from .cost.memory import WorkerMemory
from .cost.stages import Cutting
from .inputs.cluster import AllReduce, Cluster, Link, NodeKind
from .inputs.layer_parts import Contexts, Division, Experts
from .inputs.model import LayerSkip, LayerTie, Model
from .inputs.profile import LayerProfile, Profile
from .predict import Predictor, predict
from .prediction import Configuration, Parts, Prediction

__all__ = [
    "AllReduce",
    "Arrangement",
    "Cluster",
    "Configuration",
    "Contexts",
    "Cutting",
    "Division",
    "Experts",
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
