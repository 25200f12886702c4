"""Instances of a class are found, and threads that build tuples meanwhile are not disturbed."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from counterflow.capture.instances import instances_of
from counterflow.capture.tracing_internals import FakeTensor, FakeTensorMode
from counterflow.capture.walk import LRU_CACHE


def test_instances_are_those_of_the_class_itself() -> None:
    class Kind:
        pass

    class Derived(Kind):
        pass

    first, second, _ = Kind(), Kind(), Derived()
    assert {id(instance) for instance in instances_of(Kind)} == {id(first), id(second)}


def test_fake_tensors_and_caches_are_among_them() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
        view = fake[1:]
    numbers = {id(instance) for instance in instances_of(FakeTensor)}
    assert {id(fake), id(view)} <= numbers
    cache = functools.lru_cache(abs)
    assert id(cache) in {id(instance) for instance in instances_of(LRU_CACHE)}


@pytest.mark.parametrize("kind", [FakeTensor, LRU_CACHE])
def test_tuples_that_grow_meanwhile_are_whole(kind: type) -> None:
    errors: list[BaseException] = []
    ends = threading.Event()

    def build() -> None:
        try:
            while not ends.is_set():
                assert len(tuple(number for number in range(200))) == 200
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        instances_of(kind)
    ends.set()
    for thread in threads:
        thread.join()
    assert not errors
