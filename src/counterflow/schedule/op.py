"""Ops and what they make. Plain, frozen data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Product(Enum):
    """What an op makes."""

    OUTPUT = "output"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENTS = "weight gradients"


class OpKind(Enum):
    """What an op computes, with its letter.

    A backward makes two products at once. Split, it is two ops: the input gradient, which the stage before
    waits for, and the weight gradients, which only the update waits for.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.
    """

    __hash__ = object.__hash__  # its own is a Python call, for each of the millions of keys a plan looks up

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENTS = "W"

    @property
    def makes_output(self) -> bool:
        """Whether it makes its stage's output."""
        return self is OpKind.FORWARD

    @property
    def makes_input_gradient(self) -> bool:
        """Whether it makes the gradient of its stage's input."""
        return self is OpKind.BACKWARD or self is OpKind.INPUT_GRADIENT

    @property
    def makes_weight_gradients(self) -> bool:
        """Whether it makes the gradients of its stage's weights."""
        return self is OpKind.BACKWARD or self is OpKind.WEIGHT_GRADIENTS

    @property
    def products(self) -> tuple[Product, ...]:
        """What it makes."""
        made = (
            (self.makes_output, Product.OUTPUT),
            (self.makes_input_gradient, Product.INPUT_GRADIENT),
            (self.makes_weight_gradients, Product.WEIGHT_GRADIENTS),
        )
        return tuple(product for makes, product in made if makes)


class Op(NamedTuple):
    """Work of one stage on one micro-batch, a group of them, or a part of one.

    ``micro_batches`` are the micro-batches computed together (more than one in a doubled forward).
    ``part`` of ``parts`` says which share of the micro-batch a divided backward computes.
    ``version`` is the number of updates the stage's weights have seen (0 in every synchronous scheme:
    the weights at the start of the mini-batch). All numbers count from 0.

    >>> str(Op(OpKind.FORWARD, stage=7, micro_batches=(3,)))
    'F3.7'
    >>> str(Op(OpKind.BACKWARD, stage=0, micro_batches=(4,), pipe=1, part=1, parts=2, version=3))
    'B4.0p1:1/2v3'
    """

    kind: OpKind
    stage: int
    micro_batches: tuple[int, ...]
    pipe: int = 0
    part: int = 0
    parts: int = 1
    version: int = 0

    def __str__(self) -> str:
        batches = self.micro_batches
        text = str(batches[0]) if len(batches) == 1 else f"({','.join(map(str, batches))})"
        text = f"{self.kind.value}{text}.{self.stage}"
        if self.pipe:
            text += f"p{self.pipe}"
        if self.parts != 1:
            text += f":{self.part}/{self.parts}"
        if self.version:
            text += f"v{self.version}"
        return text

    @property
    def work(self) -> float:
        """Work in micro-batches: 2 for a doubled forward, 0.5 for a half backward."""
        return len(self.micro_batches) / self.parts
