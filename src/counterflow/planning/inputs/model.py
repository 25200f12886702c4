"""A model as the planner sees it: kinds of layers in a row, and further tensors that need memory.

Invariant: costs of a kind of layer are in a profile, never here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from counterflow.errors import ConfigError
from counterflow.execution import SENT_SHARES, Configured
from counterflow.schedule.layouts import Layout

from .cluster import require_number

MTP = "mtp"
"""What a layer for multi-token prediction is called."""

USER_MODELS = "cf.profile", "counterflow profile"
"""Sources of models that were measured."""

TrainValue = str | int | float | bool
ConfigValue = TrainValue | list[float] | list[str]


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """A tensor that a layer saves for later ones.

    Attributes:
        source: the layer that saves it, counted from 0.
        targets: layers that load it.
        size_bytes: its size for one sample; for all samples if it is sent once.
        once: whether it is sent once per step.

    Raises:
        ConfigError: a target is not after the source, or the bytes are out of their range.
    """

    source: int
    targets: tuple[int, ...]
    size_bytes: float
    once: bool = False

    def __post_init__(self) -> None:
        require_number("size_bytes", self.size_bytes)
        if self.source < 0 or not self.targets or min(self.targets) <= self.source:
            raise ConfigError(
                f"skips: from layer {self.source} to {list(self.targets)}: a skip leads from a layer to one "
                "or more later ones"
            )


@dataclass(frozen=True, slots=True)
class LayerTie:
    """A weight that several layers share: one tensor on a worker, with the sum of all its gradients.

    Attributes:
        layers: layers that contain it, counted from 0, ascending.
        size_bytes: its size; the weights of each of these layers include it.
        trained: whether it is trained.
        low_precision: whether it is in bfloat16 or float16, and its gradient in float32.

    Raises:
        ConfigError: there are fewer than two layers, they are out of order, or the bytes are out of their
            range.
    """

    layers: tuple[int, ...]
    size_bytes: float
    trained: bool = True
    low_precision: bool = False

    @property
    def gradient_bytes(self) -> float:
        """Size of its gradient."""
        return self.size_bytes * (1 + self.low_precision) if self.trained else 0.0

    def __post_init__(self) -> None:
        require_number("size_bytes", self.size_bytes)
        if len(self.layers) < 2 or list(self.layers) != sorted({*self.layers}) or self.layers[0] < 0:
            raise ConfigError(f"ties: {list(self.layers)}: must be two layers or more, ascending")


@dataclass(frozen=True)
class Model:
    """A list of layers.

    Attributes:
        name: name of the model.
        layers: the kind of each layer, in the order in which they run.
        optimizer_states: bytes of optimiser state for each byte of trained weights: 2 for Adam, 0 for plain
            SGD.
        input_bytes: size of the first layer's input for one sample.
        train: the keys of ``[model]`` with which ``counterflow train`` makes it; empty: it cannot be made so.
        source: origin of the model.
        skips: skip connections between layers.
        ties: weights that layers share.
        config: the other tables of the config that was profiled, without the keys that a plan decides.

    Raises:
        ConfigError: there are no layers, or a number is out of its range.

    >>> Model("tiny", ("embedding", "block", "block", "head")).runs()
    [('embedding', 1), ('block', 2), ('head', 1)]
    """

    name: str
    layers: tuple[str, ...]
    optimizer_states: float = 2.0
    input_bytes: float = 0.0
    train: Mapping[str, TrainValue] = field(default_factory=dict)
    source: str = ""
    config: Mapping[str, Mapping[str, ConfigValue]] = field(default_factory=dict)
    skips: tuple[LayerSkip, ...] = ()
    ties: tuple[LayerTie, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.name}: has no layers; give one or more")
        require_number("optimizer_states", self.optimizer_states)
        require_number("input_bytes", self.input_bytes)
        beyond = max((max(skip.targets) for skip in self.skips), default=0)
        if beyond >= len(self.layers):
            raise ConfigError(
                f"model {self.name}: a skip connection leads to layer {beyond}, but the last one is "
                f"{len(self.layers) - 1}"
            )

        tied = max((tie.layers[-1] for tie in self.ties), default=0)
        if tied >= len(self.layers):
            raise ConfigError(
                f"model {self.name}: layer {tied} shares a weight, but the last one is {len(self.layers) - 1}"
            )

    @cached_property
    def execution(self) -> Configured:
        """Execution settings of its config; a config is checked when a run starts, not here."""
        known = Configured.model_fields
        configured = self.config.get("pipeline", {})
        return Configured.model_construct(**{key: configured[key] for key in configured if key in known})  # type: ignore[arg-type]

    @property
    def barrier(self) -> bool:
        """True if steps end on all workers; as its config says, by default true."""
        return self.execution.barrier

    @property
    def clips(self) -> bool:
        """True if updates wait for the gradient's norm; as its config says, by default true."""
        return self.execution.waits_for_norm

    @property
    def shards_state(self) -> bool:
        """True if its config shards optimiser state over the holders of a stage."""
        return self.execution.zero_stage == 1

    @property
    def message_share(self) -> float:
        """Bytes of a message per byte of activations: half if its config compresses 32-bit floats."""
        execution = self.execution
        return 0.5 if execution.compress and not execution.computes_in else 1.0

    @property
    def gradient_share(self) -> float:
        """Bytes sent per byte of summed gradients: less than 1 if its config compresses sums."""
        name = self.execution.gradient_compression
        return 1.0 if name is None else SENT_SHARES[name]

    @property
    def mtp(self) -> int:
        """Layers for multi-token prediction, whose kind is ``mtp``."""
        return self.layers.count(MTP)

    def layout(self, cuts: Sequence[int]) -> Layout | None:
        """The layout of Megatron-LM that says these cuts.

        None where the model has no such layout: its first and last layer, embedding and head, are not each
        the only one of its kind, or MTP layers are not right before the head.
        """
        first, last = self.layers[0], self.layers[-1]
        alone = self.layers.count(first) == self.layers.count(last) == 1 < len(self.layers)
        if not alone or MTP in self.layers[: len(self.layers) - 1 - self.mtp] or last == MTP:
            return None
        return Layout.of_cuts(cuts, len(self.layers), self.mtp)

    def runs(self) -> list[tuple[str, int]]:
        """Equal adjacent layers, as (kind, number)."""
        runs: list[tuple[str, int]] = []
        for kind in self.layers:
            if runs and runs[-1][0] == kind:
                runs[-1] = (kind, runs[-1][1] + 1)
            else:
                runs.append((kind, 1))
        return runs
