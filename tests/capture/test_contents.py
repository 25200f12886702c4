"""Contents of objects without attributes count when they change between two steps."""

from __future__ import annotations

import array
import contextvars
import ctypes
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import counterflow as cf
from counterflow.capture.contents import Classes, ContentWatch, content_watch
from counterflow.capture.recorder import Recorder


class Holder:
    factor = 1.0


class OtherHolder(Holder):
    factor = 0.7


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_double), ("second", ctypes.c_double))


class Numbers(np.ndarray):
    """An array of a class of one's own."""


CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
HOLDER, LOCAL, EVENT, SOURCE = Holder(), threading.local(), threading.Event(), {"factor": 1.0}
REFERENCE, PROXY = weakref.ref(HOLDER), MappingProxyType(SOURCE)
SHARED = multiprocessing.Value("d", 1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.array, self.octets = array.array("d", [1.0]), bytearray([10])
        self.number, self.pair = ctypes.c_double(1.0), Pair(1.0, 1.0)
        self.objects, self.large = np.array([1.0, None], dtype=object), np.ones(100_000)
        self.dates, self.own = np.zeros(2, "datetime64[s]"), np.ones(2).view(Numbers)
        self.tensor, self.scalar, self.holder = torch.ones(3), np.float32(1.0), Holder()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        factor = self.array[0] * self.octets[0] / 10 * self.number.value * self.pair.second
        factor *= self.objects[0] * float(self.large[0]) * float(self.own[1]) * float(self.scalar)
        factor *= 0.9 if self.dates[1] > self.dates[0] else 1.0
        factor *= SHARED.value * (1.1 if EVENT.is_set() else 1.0) * REFERENCE().factor * self.holder.factor  # type: ignore[union-attr]
        factor *= PROXY["factor"] * CONTEXT.get() * getattr(LOCAL, "factor", 1.0)
        return x * factor * self.tensor[1]  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "array of Python": lambda m: m.array.__setitem__(0, 0.9),
    "bytearray": lambda m: m.octets.__setitem__(0, 9),
    "ctypes": lambda m: setattr(m.number, "value", 0.9),
    "field of a structure": lambda m: setattr(m.pair, "second", 0.9),
    "array of objects": lambda m: m.objects.__setitem__(0, 0.9),
    "large array": lambda m: m.large.fill(0.9),
    "dates": lambda m: m.dates.__setitem__(1, 7),
    "array of a class": lambda m: m.own.fill(0.9),
    "number of NumPy": lambda m: setattr(m, "scalar", np.float32(0.9)),
    "shared value": lambda _: setattr(SHARED, "value", 0.9),
    "event": lambda _: EVENT.set(),
    "weak reference": lambda _: setattr(HOLDER, "factor", 0.9),
    "class": lambda m: setattr(m.holder, "__class__", OtherHolder),
    "class of a module": lambda m: setattr(m.layers[1], "__class__", Doubled),
    "proxy of a dict": lambda _: SOURCE.update(factor=0.9),
    "context": lambda _: CONTEXT.set(0.9),
    "thread": lambda _: setattr(LOCAL, "factor", 0.9),
    "tensor by its data": lambda m: m.tensor.data.fill_(0.9),
    "tensor by an array": lambda m: m.tensor.numpy().fill(0.8),
}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return 2 * super().forward(input)


def pipeline_of(model: nn.Module, x: Tensor) -> cf.Pipeline:
    return cf.Pipeline(
        model,
        functional.mse_loss,
        "dapple(stages=1, micro_batches=1)",
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        example=x,
        witness_every=0,
    )


def test_contents_that_change_count_from_the_next_step_on() -> None:
    def work() -> None:
        torch.manual_seed(0)
        model, x, target = Net(), torch.randn(4, 8), torch.zeros(4, 8)
        with pipeline_of(model, x) as pipeline:
            for name, change in CHANGES.items():
                change(model)
                with torch.no_grad():
                    expected = functional.mse_loss(model(x), target).item()
                assert pipeline.step(x, target).loss == pytest.approx(expected), name

    cf.launch(work, workers=1, transport="local")


class Statistics:
    """Numbers of each worker, of which forwards read one."""

    def __init__(self) -> None:
        self.on, self.times, self.seen = True, np.zeros(20_000), multiprocessing.Value("l", 0)

    def note(self, step: int) -> None:
        self.times[:] = step
        self.seen.value += 1


class Waiting:
    """An event for which a thread waits, and the thread."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.thread = threading.Thread(target=self.event.wait, daemon=True)
        self.factor = 1.0


STATISTICS, WAITING, TABLE = Statistics(), Waiting(), weakref.WeakValueDictionary[str, Holder]()
SCALES: dict[str, Any] = {}
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


class SetsVariable(nn.Module):
    """A layer that leaves a variable set, which no other code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        VARIABLE.set(2.0)
        return self.linear(x) * VARIABLE.get()  # type: ignore[no-any-return]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SetsVariable() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        factor = (1.0 if STATISTICS.on else 2.0) * WAITING.factor * (3.0 if WAITING.event.is_set() else 1.0)
        factor *= TABLE["holder"].factor if "holder" in TABLE else 0.5
        for values in SCALES.values():
            first = values.flat[0] if isinstance(values, np.ndarray) else values[0]
            factor *= (
                0.7 if first is np.ma.masked else 1.0 + 0.1 * float(first) + 0.01 * np.asarray(values).ndim
            )
            factor *= 1.1 if np.asarray(values).dtype.kind == "f" else 1.0
        return x * factor


def test_replaced_and_released_objects_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose bytes are the same, and those that only a guard would keep alive."""
    holders = [Holder()]
    TABLE["holder"] = holders[0]
    WAITING.thread.start()
    masked = np.ma.masked_array([1.0, 2.0])
    SCALES.update(ints=np.zeros(4, "i8"), shaped=np.ones(4), coded=array.array("l", [0]), masked=masked)
    SCALES.update(
        large=np.ones(65536), strided=np.ones((512, 512)).T[::2], column=np.ones((300, 300), order="F")
    )
    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "dtype": lambda: SCALES.update(ints=np.zeros(4)),
        "shape": lambda: SCALES.update(shaped=np.ones((2, 2))),
        "code": lambda: SCALES.update(coded=array.array("d", [0.0])),
        "mask": lambda: masked.__setitem__(0, np.ma.masked),
        "large array": lambda: SCALES.update(large=np.full(65536, 2.0)),
        "large array in place": lambda: SCALES["large"].__imul__(2),
        "strided array in place": lambda: SCALES["strided"].fill(3.0),
        "array by columns in place": lambda: SCALES["column"].fill(3.0),
        "weak table": holders.clear,
        "event": WAITING.event.set,
    }

    def work() -> None:
        torch.manual_seed(0)
        model, x, target = Reads(), torch.randn(4, 8), torch.zeros(4, 8)
        with pipeline_of(model, x) as pipeline:
            for _ in range(2):  # after the first one the variable is set
                pipeline.step(x, target)
            with monkeypatch.context() as patch:
                patch.delattr(Recorder, "run")  # nothing reads what a worker counts for itself
                for step in range(3):
                    STATISTICS.note(step)
                    pipeline.step(x, target)
            for name, change in changes.items():
                change()
                with torch.no_grad():
                    expected = functional.mse_loss(model(x), target).item()
                assert pipeline.step(x, target).loss == pytest.approx(expected), name

    cf.launch(work, workers=1, transport="local")


class SetsContext(Net):
    def forward(self, x: Tensor) -> Tensor:
        token = CONTEXT.set(2 * CONTEXT.get())
        y = super().forward(x)
        if self.resets:
            CONTEXT.reset(token)
        return y

    resets = True


class StaysSet(SetsContext):
    resets = False


def test_a_context_that_a_forward_sets_is_reset_or_refused() -> None:
    torch.manual_seed(0)
    model, x = SetsContext(), torch.randn(4, 8)
    assert cf.same_model(model, cf.layers(model, x), x).ok
    before = CONTEXT.get()
    with pytest.raises(cf.ConfigError, match="changes the global 'CONTEXT'"):
        cf.layers(StaysSet(), x)
    assert CONTEXT.get() == before


def watched(value: Any) -> ContentWatch:
    watch = content_watch("value", value)
    assert watch is not None
    return watch


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"ab"),
        array.array("i", [1, 2]),
        np.arange(4.0),
        np.arange(8.0)[::2],
        np.array([1, "a"], dtype=object),
    ],
    ids=["bytearray", "array", "numbers", "strided", "objects"],
)
def test_contents_are_restored(value: Any) -> None:
    watch, saved = watched(value), list(value)
    value[1] = 0
    changed = not watch.unchanged()
    watch.restore()
    assert changed
    assert (list(value) == saved) == watch.unchanged()
    assert watch.unchanged() or not memoryview(value).c_contiguous


def test_contexts_and_classes_are_restored() -> None:
    holder, context = Holder(), contextvars.ContextVar("context", default=1)
    classes, watch = Classes([("holder", holder)]), watched(context)
    holder.__class__ = OtherHolder
    context.set(2)
    assert classes.label == "the class of holder"
    assert not classes.unchanged()
    assert not watch.unchanged()
    classes.restore()
    watch.restore()
    assert type(holder) is Holder
    assert context.get() == 1


def test_objects_without_a_content_have_no_watch() -> None:
    assert content_watch("value", Holder()) is None
    assert content_watch("value", threading.Lock()) is None
    assert content_watch("value", np.dtype("f4")) is None
