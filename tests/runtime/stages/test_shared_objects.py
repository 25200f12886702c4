"""Python objects through which layers of several stages communicate are refused; shared constants and caches
are not.
"""

from __future__ import annotations

import contextvars
import itertools
import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterflow.errors import ConfigError, WorkerError
from counterflow.runtime.pipeline import Pipeline
from counterflow.runtime.stages.sharing.reach import reach_of
from counterflow.runtime.stages.sharing.sources import Use, use_of
from counterflow.runtime.stages.sharing.subjects import SharedSubject, Snapshot
from counterflow.runtime.workers.launch import launch

from ...kit import batch, sgd

F = torch.float64
GPIPE = "gpipe(stages=2, micro_batches=2)"
ONE_WORKER = "interleaved(workers=1, micro_batches=2, chunks=2)"

NOTES: dict[str, Any] = {}
CALLS = 0
LAST: contextvars.ContextVar[Any] = contextvars.ContextVar("LAST", default=0.0)


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


class Layer(nn.Module):
    """A linear layer that holds ``state``, which is no parameter, buffer or module of its own."""

    state: Any

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=F)
        vars(self)["state"] = state

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).tanh()


class WritesKey(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state["mean"] = mean(x)
        return super().forward(x)


class ReadsKey(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state.get("mean", 0.0)


class WritesAttribute(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.mean = mean(x)
        return super().forward(x)


class ReadsAttribute(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state.mean


class Counts(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.calls += 1
        return super().forward(x) / self.state.calls


class CountsInClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        CountsInClass.calls += 1
        return super().forward(x) / CountsInClass.calls


class Settings:
    scale = 1.0


class OwnSettings(Settings):
    pass


class WritesBase(Layer):
    def forward(self, x: Tensor) -> Any:
        Settings.scale += 0.1
        return super().forward(x)


class ReadsInherited(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.state.scale


class ReadsBySubclass(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * OwnSettings.scale


class CountsGlobally(Layer):
    def forward(self, x: Tensor) -> Any:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return super().forward(x) / CALLS


class CountsOwn(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) / self.calls


class WritesGlobal(Layer):
    def forward(self, x: Tensor) -> Any:
        NOTES["mean"] = mean(x)
        return super().forward(x)


class ReadsGlobal(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + NOTES.get("mean", 0.0)


class WritesContext(Layer):
    def forward(self, x: Tensor) -> Any:
        LAST.set(mean(x))
        return super().forward(x)


class ReadsContext(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + LAST.get()


class Appends(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.append(float(x.detach().mean()))
        return super().forward(x)


class ReadsAll(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + sum(self.state))


class Store:
    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}

    def put(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def get(self, key: Any) -> Any:
        return self.entries.get(key, 0.0)


class Puts(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.put("mean", mean(x))
        return super().forward(x)


class Gets(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state.get("mean")


class KeepsLast(Layer):
    last = torch.zeros(4, dtype=F)

    def forward(self, x: Tensor) -> Any:
        self.last = mean(x)
        return super().forward(x)


class ReadsPeer(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state[0].last


class Averages(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.mul_(0.9).add_(mean(x), alpha=0.1)
        return super().forward(x)


class Adds(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state


class TakesNext(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + next(self.state))


class Draws(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * float(self.state.random())


class Calls(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.state(super().forward(x))


class WritesOnce(Layer):
    def forward(self, x: Tensor) -> Any:
        if "mean" not in self.state:
            self.state["mean"] = mean(x)
        return super().forward(x)


class WritesInEvaluation(Layer):
    def forward(self, x: Tensor) -> Any:
        if not self.training:
            self.state["mean"] = mean(x)
        return super().forward(x)


def counting(notes: dict[str, int], x: Tensor) -> Tensor:
    notes["calls"] += 1
    return x / notes["calls"]


def counting_by_default(x: Tensor, notes: dict[str, int] = {"calls": 1}) -> Tensor:  # noqa: B006
    notes["calls"] += 1
    return x / notes["calls"]


def closures() -> list[Any]:
    last, calls = [torch.zeros(4, dtype=F)], 1

    def write(x: Tensor) -> Tensor:
        last[0] = mean(x)
        return x

    def read(x: Tensor) -> Tensor:
        return x + last[0]

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x / calls

    return [write, read, count]


def between(first: nn.Module, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, Layer(), Layer(), Layer(), last, Layer())


def pair(first: type[Layer], last: type[Layer], state: Callable[[], Any]) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        shared = state()
        return between(first(shared), last(shared))

    return make


def namespace() -> types.SimpleNamespace:
    return types.SimpleNamespace(mean=torch.zeros(4, dtype=F), calls=1)


def peers() -> nn.Sequential:
    first = KeepsLast()
    return between(first, ReadsPeer([first]))


def twice(kind: type[Layer]) -> nn.Sequential:
    module = kind()
    return between(module, module)


def called(first: int, last: int) -> nn.Sequential:
    functions = closures()
    return between(Calls(functions[first]), Calls(functions[last]))


def hooked() -> nn.Sequential:
    model, notes = between(Layer(), Layer()), {}

    def write(_: nn.Module, inputs: Any, output: Tensor) -> None:
        del inputs
        notes["mean"] = mean(output)

    def read(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        del inputs
        return output + notes.get("mean", 0.0)

    model[0].register_forward_hook(write)
    model[4].register_forward_hook(read)
    return model


REFUSED: dict[str, Callable[[], nn.Sequential]] = {
    "a dict": pair(WritesKey, ReadsKey, dict),
    "a namespace": pair(WritesAttribute, ReadsAttribute, namespace),
    "a counter": pair(Counts, Counts, namespace),
    "a class attribute": pair(CountsInClass, CountsInClass, dict),
    "an attribute of a base, by an object": pair(WritesBase, ReadsInherited, OwnSettings),
    "an attribute of a base, by a subclass": pair(WritesBase, ReadsBySubclass, dict),
    "a global": pair(CountsGlobally, CountsGlobally, dict),
    "a global dict": pair(WritesGlobal, ReadsGlobal, dict),
    "a context variable": pair(WritesContext, ReadsContext, dict),
    "a list": pair(Appends, ReadsAll, list),
    "an object with methods": pair(Puts, Gets, Store),
    "an attribute of another layer": peers,
    "an attribute of a module used twice": lambda: twice(CountsOwn),
    "a tensor": pair(Averages, Adds, lambda: torch.zeros(4, dtype=F)),
    "an iterator": pair(TakesNext, TakesNext, itertools.count),
    "a generator of random numbers": pair(Draws, Draws, lambda: random.Random(0)),
    "a list in closures": lambda: called(0, 1),
    "a variable of closures": lambda: called(2, 2),
    "an argument of a partial": pair(Calls, Calls, lambda: partial(counting, {"calls": 1})),
    "a default argument": pair(Calls, Calls, lambda: counting_by_default),
    "hooks": hooked,
    "in evaluation": pair(WritesInEvaluation, ReadsKey, dict),
}


class Table(nn.Module):
    """A table that grows with what it is used for, as those of rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.table = 0, torch.zeros(0, dtype=F)

    def forward(self, x: Tensor) -> Any:
        if len(x) > self.size:
            self.size = len(x)
            self.table = torch.arange(self.size, dtype=F).cos()
        return x * self.table[: len(x), None]


class UsesTable(Layer):
    def forward(self, x: Tensor) -> Any:
        return self.state(super().forward(x))


class CachesBySize(Layer):
    def forward(self, x: Tensor) -> Any:
        if len(x) not in self.state:
            self.state[len(x)] = torch.arange(len(x), dtype=F).cos()
        return super().forward(x) * self.state[len(x)][:, None]


class MakesAgain(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state["table"] = torch.arange(len(x), dtype=F).cos()
        return super().forward(x) * self.state["table"][:, None]


class Logs(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state["seen"].append(mean(x))
        self.state["last"] = x.detach()
        return super().forward(x) * self.state["scale"]


class PutsOwn(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.put(id(self), x.detach())
        return super().forward(x)


class Keeps(Layer):
    """Reaches the whole model, and keeps a value of its own under a name that all layers use."""

    def forward(self, x: Tensor) -> Any:
        self.kept = super().forward(x)
        return self.kept


def with_the_model() -> nn.Sequential:
    root: list[nn.Module] = []
    model = between(Keeps(root), Keeps(root))
    root.append(model)
    return model


RIGHT: dict[str, Callable[[], nn.Sequential]] = {
    "a table that grows": pair(UsesTable, UsesTable, Table),
    "a cache by size": pair(CachesBySize, CachesBySize, dict),
    "the same contents again": pair(MakesAgain, MakesAgain, dict),
    "notes that no layer reads": pair(Logs, Logs, lambda: {"seen": [], "scale": 0.5}),
    "notes in an object": pair(PutsOwn, PutsOwn, Store),
    "an attribute that no layer reads": lambda: twice(KeepsLast),
    "the model": with_the_model,
}


def made(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(0)
    return make()


def losses(make: Callable[[], nn.Sequential], schedule: str) -> list[float]:
    pipeline = Pipeline(made(make), nn.MSELoss(), schedule, optimizer=sgd)
    found = [pipeline.step(*batch(number)).loss for number in range(4)]
    return found + [pipeline.evaluate(*batch(number)).loss for number in (8, 9)]


def losses_of_one_process(make: Callable[[], nn.Sequential]) -> list[float]:
    model = made(make)
    optimizer, found = sgd(model.parameters()), []
    for number in (0, 1, 2, 3, 8, 9):
        optimizer.zero_grad()
        halves = zip(*(each.chunk(2) for each in batch(number)), strict=True)
        each = [functional.mse_loss(model(x), y) / 2 for x, y in halves]
        found.append(sum(loss.item() for loss in each))
        if number < 4:
            torch.stack(each).sum().backward()
            optimizer.step()
    return found


def run(work: Callable[..., Any], *args: Any, workers: int = 2) -> Any:
    return launch(work, *args, workers=workers, transport="local", timeout_seconds=30)[0]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("schedule", "workers"), [(GPIPE, 2), (ONE_WORKER, 1)])
def test_what_passes_from_one_stage_to_another_is_refused(name: str, schedule: str, workers: int) -> None:
    with pytest.raises(ConfigError, match=r"^layer [04] \(\w+\) changes .* in a forward, and layer [04] \("):
        run(losses, REFUSED[name], schedule, workers=workers)


def test_what_one_stage_writes_once_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^layer 0 \(WritesOnce\) changes 'mean' of self\.state in a forward"
    ):
        run(losses, pair(WritesOnce, ReadsKey, dict), GPIPE)


def test_what_the_loss_function_reads_is_refused() -> None:
    def work() -> None:
        model: Any = made(peers)[:4]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            found: Tensor = functional.mse_loss(output, target) * (1 + model[0].last.abs().sum())
            return found

        pipeline = Pipeline(model, loss, GPIPE, optimizer=sgd, per_micro_batch_loss=True)
        for number in range(3):
            pipeline.step(*batch(number))

    with pytest.raises(ConfigError, match=r"changes 'last' of self in a forward, and the loss function"):
        run(work)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(("schedule", "workers"), [(GPIPE, 2), (ONE_WORKER, 1)])
def test_constants_caches_and_notes_are_as_in_one_process(name: str, schedule: str, workers: int) -> None:
    found = run(losses, RIGHT[name], schedule, workers=workers)
    assert found == pytest.approx(losses_of_one_process(RIGHT[name]), rel=1e-12)


def test_one_worker_with_one_micro_batch_runs_the_layers_in_their_order() -> None:
    found = run(losses, REFUSED["a dict"], "interleaved(workers=1, micro_batches=1, chunks=2)", workers=1)
    assert len(found) == 6


class Pushes(Layer):
    def forward(self, x: Tensor) -> Any:
        self.state.append(mean(x))
        return super().forward(x)


class Pops(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state.pop()


class TakesKey(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state["mean"]


class SetsDefault(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.state.setdefault("mean", mean(x))


class ReadsAndFails(Layer):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x) * len(self.state)
        raise IndexError("of another kind")


@pytest.mark.parametrize(
    ("first", "last", "state", "words"),
    [
        (Pushes, Pops, list, r"IndexError: pop from empty list\) where it reads self\.state"),
        (SetsDefault, TakesKey, dict, r"KeyError: 'mean'\) where it reads self\.state"),
        (WritesKey, TakesKey, dict, r"KeyError: 'mean'\) where it reads self\.state"),
        (
            WritesAttribute,
            ReadsAttribute,
            types.SimpleNamespace,
            r"AttributeError: .*\) where it reads self\.state",
        ),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_layer_that_fails_where_it_reads_a_shared_object_is_refused(
    first: type[Layer], last: type[Layer], state: Callable[[], Any], words: str, *, evaluates: bool
) -> None:
    def work() -> None:
        pipeline = Pipeline(made(pair(first, last, state)), nn.MSELoss(), GPIPE, optimizer=sgd)
        (pipeline.evaluate if evaluates else pipeline.step)(*batch(0))

    with pytest.raises(ConfigError, match=rf"^layer 4 \({last.__name__}\) fails \({words}, which layer 0 \("):
        run(work)


def test_a_layer_that_fails_elsewhere_fails() -> None:
    with pytest.raises(WorkerError, match="IndexError: of another kind"):
        run(losses, pair(Pushes, ReadsAndFails, list), GPIPE)


class RefusalError(Exception):
    """An exception of the user's."""


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square() * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0], None


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


class Sized(Layer):
    """A layer whose line that calls something of all layers fails for other than four weights."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("weight", torch.ones(size, dtype=F))


class CallsFunction(Sized):
    def forward(self, x: Tensor) -> Any:
        return scaled(super().forward(x), self.get_buffer("weight"))


class CallsClass(Sized):
    def forward(self, x: Tensor) -> Any:
        return Squared.apply(super().forward(x), self.get_buffer("weight"))  # type: ignore[no-untyped-call]


class Raises(Sized):
    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        if self.state != 4:
            raise RefusalError(f"{self.state} weights")
        return output


class HasVariable(CallsFunction):
    """One with a variable of the same name."""

    def forward(self, x: Tensor) -> Any:
        scaled = super().forward(x)
        return scaled.tanh()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (CallsFunction, "RuntimeError: The size of tensor"),
        (CallsClass, "RuntimeError: The size of tensor"),
        (HasVariable, "RuntimeError: The size of tensor"),
        (Raises, "RefusalError: 5 weights"),
    ],
)
def test_a_layer_that_fails_where_it_calls_what_others_call_fails(kind: type[Sized], words: str) -> None:
    def work() -> None:
        model = between(kind(4), kind(5))
        Pipeline(model, nn.MSELoss(), GPIPE, optimizer=sgd).step(*batch(0))

    with pytest.raises(WorkerError, match=words):
        run(work)


class Uses(nn.Module):
    """One use of ``self.notes`` a method."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {"a": torch.zeros(1), "b": 1}

    def set_entry(self) -> None:
        self.notes["a"] = torch.ones(1)

    def read_entry(self) -> Any:
        return self.notes["a"]

    def read_other_entry(self) -> Any:
        return self.notes["b"]

    def read_by_get(self) -> Any:
        return self.notes.get("a")

    def read_other_by_get(self) -> Any:
        return self.notes.get("b")

    def change_in_place(self) -> None:
        self.notes["a"].add_(1).mul_(2)

    def read_by_another_name(self) -> Any:
        notes = self.notes
        return notes["a"]

    def pass_on(self) -> Any:
        return len(self.notes)

    def look(self) -> Any:
        return "a" in self.notes

    def nothing(self) -> Any:
        return self.training


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("set_entry", Use.WRITE),
        ("read_entry", Use.ANY),
        ("read_other_entry", Use.NONE),
        ("read_by_get", Use.ANY),
        ("read_other_by_get", Use.NONE),
        ("change_in_place", Use.WRITE),
        ("read_by_another_name", Use.ANY),
        ("pass_on", Use.ANY),
        ("look", Use.READ),
        ("nothing", Use.NONE),
    ],
)
def test_uses_are_read_off_the_source(name: str, use: Use) -> None:
    module = Uses()
    reached = reach_of([(0, module)]).reached[id(module.notes), None]
    found = use_of(reached.paths, [vars(Uses)[name].__code__], {"a"})
    assert found is use or (use is Use.ANY and Use.READ in found)


def test_without_a_source_whoever_names_it_may_read_it() -> None:
    scope: dict[str, Any] = {}
    exec("def log(self): self.notes['a'] = 1\ndef other(self): return self.training", scope)
    module = Uses()
    paths = reach_of([(0, module)]).reached[id(module.notes), None].paths
    assert use_of(paths, [scope["log"].__code__], {"a"}) is Use.ANY
    assert use_of(paths, [scope["other"].__code__], {"a"}) is Use.NONE


class Private(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__notes: dict[str, int] = {}

    def read(self) -> Any:
        return self.__notes["a"]


def test_private_names_are_found() -> None:
    module = Private()
    reached = reach_of([(0, module)]).reached.values()
    paths = next(each.paths for each in reached if isinstance(each.subject.target, dict))
    assert Use.READ in use_of(paths, [Private.read.__code__], {"a"})


def test_changes_of_entries() -> None:
    notes: dict[str, Any] = {"table": torch.zeros(2), "calls": 1, "none": None, "seen": [1]}
    table = torch.zeros(2)
    notes["same"] = table
    snapshot = Snapshot(SharedSubject(notes))
    assert snapshot.changed() == (set(), set())
    notes["same"] = torch.zeros(2)  # equal contents
    assert snapshot.changed() == (set(), set())
    notes["none"], notes["more"] = 1, 2
    assert snapshot.changed() == (set(), {"none", "more"})
    notes["calls"] = 2
    assert snapshot.changed() == ({"calls"}, {"none", "more"})
    notes["table"] = torch.zeros(3)  # longer, up to the number beside it
    assert snapshot.changed() == (set(), {"none", "more", "table", "calls"})
    del notes["seen"]
    assert snapshot.changed()[0] == {"seen"}
    values = Snapshot(SharedSubject(table))
    table.data.add_(1)
    assert values.changed() == ({""}, set())
