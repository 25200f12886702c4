"""Seeds of random streams: the rule of the engine, written down once more, as draws are compared too."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from .reference_parts import MicroBatchPart

_BITS = 2**64 - 1


class RandomSeeds:
    """Seeds of the random draws of each layer, by step, micro-batch and part.

    Args:
        seed: seed of the run.
        device: device of the layers.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def restored(self) -> Any:
        """Context after which the user's random state is as before."""
        device = self._device
        if device.type != "cuda":
            return torch.random.fork_rng(devices=[])
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.random.fork_rng(devices=[index])

    def seed_weights(self, layer: int) -> None:
        """Seed the initialisation of a layer."""
        self._apply(_digest(self._seed, "weights", layer))

    def seed_layer(self, layer: int, step: int, part: MicroBatchPart) -> None:
        """Seed a layer's forward (SplitMix64 of a base of the step)."""
        base = _digest(self._seed, step)
        mixed = base + part.micro_batch * 0x9E3779B97F4A7C15 + layer * 0xD1342543DE82EF95
        mixed += (part.start << 32 | part.samples - part.stop) * 0xD6E8FEB86659FD93
        mixed &= _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        self._apply(mixed >> 12)

    def _apply(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)


def _digest(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 12
