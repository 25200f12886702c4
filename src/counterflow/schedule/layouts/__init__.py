"""Layouts: which layers each stage has, as Megatron-LM's strings say it; read, written and re-derived.

Invariant: what is written is read back as the same stages, here and by Megatron-LM. What it does not do: say
in which order stages work, or on which worker a stage lies.
"""

from .megatron_layout import LayerKind, Layout, Stage
from .rederived import Rederived, rederive

__all__ = ["LayerKind", "Layout", "Rederived", "Stage", "rederive"]
