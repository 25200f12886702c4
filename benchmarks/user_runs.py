"""A user's program on one process and in a pipeline: the same calls, and what they give.

The process knows nothing of pipelines: it calls the model on the whole mini-batch. Only where the documents
say that a micro-batch is seen alone (batch statistics, what changes in each forward) it calls it for each of
these.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import user_models
from torch import Tensor, nn
from user_losses import LOSSES
from user_models import (
    FEATURES,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Carries,
    Config,
    Net,
    as_double,
    list_of,
    logits_of,
)

import counterflow as cf
from counterflow.runtime.messages.values import Unit
from counterflow.runtime.mini_batch.samples import split_points
from counterflow.schedule import registry
from counterflow.schedule.registry import schedule_of
from counterflow.verification.reference_parts import parts_of


@dataclass(frozen=True)
class Case:
    """A drawn program.

    Attributes:
        number: its place among those of its seed.
        captured: whether layers are found from an example; else the user lists them.
        tokens: whether samples are sequences of token ids.
        blocks: blocks and features, in order.
        inline: features in the whole model's forward, with the block before which they stand.
        shared: what two blocks share, and which; empty: nothing.
        container: how the hidden state passes between blocks.
        form: of the output.
        inputs: what the model takes.
        tied: whether the head has the entry's weight.
        skip: whether the entry's output is added at the end.
        repeat: whether the first block runs again at the end.
        forces: whether the forward adds the gradient of its output.
        collect: whether the mean of all hidden states is added at the end.
        borrow: whether the forward uses the weight of the entry once more.
        loss: name of the loss.
        habits: step and name of what the user does.
        scheme: schedule as text.
        options: of the pipeline.
        replicas: of the pipeline.
        model_outside: whether threads receive one model.
        optimizer: name of the optimizer.
        samples: of a replica's mini-batch.
        steps: how many.
        looks: steps after which the user evaluates and predicts.
        pick: chooses among places.
        single: whether the weights are float32.
    """

    seed: int
    number: int
    captured: bool = False
    tokens: bool = False
    blocks: tuple[str, ...] = ("mlp", "dense", "gate", "mlp", "dense", "mlp")
    inline: tuple[tuple[int, str], ...] = ()
    shared: tuple[str, int, int] | tuple[()] = ()
    container: str = "tensor"
    form: str = "tensor"
    inputs: str = "tensor"
    tied: bool = False
    skip: bool = False
    repeat: bool = False
    forces: bool = False
    collect: bool = False
    borrow: bool = False
    loss: str = "mean of squares"
    habits: tuple[tuple[int, str], ...] = ()
    scheme: str = "dapple(stages=2, micro_batches=2)"
    options: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    model_outside: bool = False
    optimizer: str = "sgd"
    samples: int = 8
    steps: int = 4
    looks: tuple[int, ...] = (3,)
    pick: int = 0
    single: bool = False

    @property
    def features(self) -> list[str]:
        """Names of its features."""
        return [*(n for n in self.blocks if n in FEATURES), *(n for _, n in self.inline)]

    def any(self, what: str) -> bool:
        """Whether a feature of it has this flag."""
        return any(getattr(FEATURES[name], what) for name in self.features)

    @property
    def synchronous(self) -> bool:
        return schedule_of(self.scheme, {}).synchronous

    @property
    def by_unit(self) -> bool:
        """Whether one process has to see each micro-batch alone."""
        return self.any("by_unit") or bool(self.shared) or self.lower

    @property
    def lower(self) -> bool:
        """Whether something is computed in lower precision."""
        return self.single or self.any("loose") or "autocast" in self.options

    @property
    def varies(self) -> bool:
        return self.any("varies")


@dataclass(frozen=True)
class Batch:
    """A replica's mini-batch."""

    inputs: Any
    targets: Any
    kwargs: dict[str, Any] | None = None


def batch_of(
    case: Case, step: int, replica: int, samples: int | None = None, positions: int = POSITIONS
) -> Batch:
    """A replica's mini-batch of a step."""
    number = 0 if case.varies else step
    draws = torch.Generator().manual_seed(1000 * case.number + 10 * number + replica)
    count = samples or case.samples
    dtype = torch.float32 if case.single else torch.float64
    if case.tokens:
        x = torch.randint(0, VOCABULARY, (count, positions), generator=draws)
        y = torch.randint(0, VOCABULARY, (count, positions), generator=draws)
        y[:, 0] = 4  # each sample has a target that counts
        side = torch.randn(count, positions, WIDTH, generator=draws, dtype=dtype)
    else:
        x = torch.randn(count, WIDTH, generator=draws, dtype=dtype)
        y = torch.randn(count, WIDTH, generator=draws, dtype=dtype)
        side = torch.randn(count, WIDTH, generator=draws, dtype=dtype)
    targets: Any = y
    if LOSSES[case.loss].weighted:
        targets = {"y": y, "weight": torch.rand(count, generator=draws, dtype=dtype) + 0.05}
    bounds = torch.arange(count) / count
    match case.inputs:
        case "tuple":
            return Batch((x, side), targets)
        case "dict":
            return Batch({"x": x, "side": side}, targets)
        case "kwargs":
            return Batch(x, targets, {"side": side})
        case "bounds":
            return (
                Batch({"x": x, "bounds": bounds}, targets)
                if case.captured
                else Batch(x, targets, {"bounds": bounds})
            )
    return Batch(x, targets)


def rows_of(tree: Any, rows: slice) -> Any:
    """Some samples of a tree of tensors; bounds stay whole."""
    if isinstance(tree, dict):
        return {name: value if name == "bounds" else rows_of(value, rows) for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(rows_of(value, rows) for value in tree)
    return tree[rows] if isinstance(tree, Tensor) else tree


def joined(parts: list[Any]) -> Any:
    """Outputs of several runs as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return type(first)({name: joined([part[name] for part in parts]) for name in first})
    if isinstance(first, (tuple, list)):
        return type(first)(joined([part[i] for part in parts]) for i in range(len(first)))
    return type(first)(joined([p.logits for p in parts]), joined([p.hidden for p in parts]))


class Program:
    """What the user has: a model, its configuration, a loss function."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.number)
        self.case, self.config = case, Config()
        self.model: nn.Module = Net(case, self.config) if case.captured else list_of(case, self.config)
        if not case.single:
            as_double(self.model)
        self.loss = LOSSES[case.loss].make(self.model)
        self.turn, self.acted = threading.Lock(), set[tuple[int, str]]()

    def first(self, step: int, habit: str) -> bool:
        """Whether no other thread that has this model does the same; call it in ``turn``."""
        new = (step, habit) not in self.acted
        self.acted.add((step, habit))
        return new

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks, without what packs their input."""
        case = self.case
        listed = list(self.model.blocks if case.captured else list(self.model)[1 : 1 + len(case.blocks)])  # type: ignore
        return [block.block if isinstance(block, Carries) else block for block in listed]

    @property
    def usual(self) -> list[nn.Module]:
        """Blocks that are no features and share nothing."""
        shared = self.case.shared[1:] if self.case.shared else ()
        named = zip(self.case.blocks, self.blocks, strict=False)
        return [b for i, (n, b) in enumerate(named) if n not in FEATURES and i not in shared]

    def owner(self, feature: str) -> Any:
        """The module whose forward has a feature."""
        if feature in self.case.blocks:
            return self.blocks[self.case.blocks.index(feature)]
        return self.model


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of the user."""
    match name:
        case "momentum":
            return torch.optim.SGD(parameters, 0.01, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(parameters, 0.01, eps=1e-3)
        case "still":
            return torch.optim.SGD(parameters, 0.0)
    return torch.optim.SGD(parameters, 0.03)


@dataclass
class Record:
    """What a program gave.

    Attributes:
        losses: by step.
        looks: results of evaluations and predictions, by step and kind.
        state: weights and buffers at the end, by name.
        exercised: the last step before which the user did something; -1: never.
        step: the step that runs.
        notes: what the user saw: caught errors.
        stages: of this worker's parameters, by name.
    """

    losses: dict[int, float] = field(default_factory=dict)
    looks: dict[tuple[int, str], Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    exercised: int = -1
    step: int = -1
    notes: list[str] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)


@contextmanager
def evaluating(*modules: Any) -> Iterator[None]:
    """Evaluation mode of all modules, then each one's own."""
    modes = [(part, part.training) for m in modules if isinstance(m, nn.Module) for part in m.modules()]
    for part, _ in modes:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def number_of(found: Any) -> Tensor:
    """The loss that a loss function gave."""
    if isinstance(found, cf.LossSum):
        return found.sum / found.weight
    if isinstance(found, tuple):
        return number_of(found[0])
    return number_of(found["loss"]) if isinstance(found, dict) else found


class Plain:
    """Training on one process.

    Args:
        stages: stage of each parameter, and the number of stages, in an asynchronous scheme.
        by_micro_batch: whether the loss is the mean of the micro-batches' losses.
    """

    def __init__(
        self,
        program: Program,
        record: Record,
        *,
        stages: Mapping[str, int] | None = None,
        by_micro_batch: bool = False,
    ) -> None:
        self.program, self.case, self.record = program, program.case, record
        self.by_micro_batch = by_micro_batch
        self.schedule = schedule_of(self.case.scheme, {})
        self.stages = stages
        self.pending: list[Batch] = []
        self.renew()

    def parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.program.model.named_parameters())
        if isinstance(self.program.loss, nn.Module):
            named |= {f"loss_function.{n}": p for n, p in self.program.loss.named_parameters()}
        return named

    def renew(self) -> None:
        self.trained = self.parameters()
        self.optimizer = optimizer_of(self.case.optimizer, list(self.trained.values()))
        self.clip = self.case.options.get("clip_norm")
        self.pause()

    def pause(self) -> None:
        """Restart the count of versions."""
        self.history = [[p.detach().clone() for p in self.trained.values()]]

    # -- a step

    def _units(self, samples: int, *, training: bool) -> Iterator[slice]:
        points = split_points(samples, self.schedule.micro_batches)
        for m, parts in enumerate(
            parts_of(self.schedule) if training else (1,) * self.schedule.micro_batches
        ):
            for part in range(parts):
                rows = Unit(m, part, parts).rows(points[m + 1] - points[m])
                if rows.stop > rows.start:
                    yield slice(points[m] + rows.start, points[m] + rows.stop)

    def _call(self, batch: Batch) -> Any:
        lower = self.case.options.get("autocast")
        with torch.autocast("cpu", lower) if lower else nullcontext():
            kwargs = batch.kwargs or {}
            if self.case.captured and isinstance(batch.inputs, tuple):
                return self.program.model(*batch.inputs, **kwargs)
            if self.case.captured and isinstance(batch.inputs, dict):
                return self.program.model(**batch.inputs, **kwargs)
            if self.case.captured:
                return self.program.model(batch.inputs, **kwargs)
            first, *others = self.program.model  # type: ignore[misc]
            value = first(batch.inputs, **kwargs)
            for layer in others:
                value = layer(value)
            return value

    def _loss(self, batches: list[Batch], *, training: bool) -> Tensor:
        terms: list[tuple[float, Tensor]] = []
        total = sum(len(logits_target(b)) for b in batches)
        outputs, each = [], []
        for batch in batches:
            count = len(logits_target(batch))
            by_unit = self.case.by_unit or self.by_micro_batch
            for rows in self._units(count, training=training) if by_unit else [slice(0, count)]:
                part = Batch(*(rows_of(t, rows) for t in (batch.inputs, batch.targets, batch.kwargs)))
                with cf.added_losses() as added:
                    outputs.append(self._call(part))
                    if self.by_micro_batch:
                        each.append(
                            ((rows.stop - rows.start) / total, self._loss_of(outputs[-1], part.targets))
                        )
                terms += [((rows.stop - rows.start) / total, value) for value in added.values()]
        if self.by_micro_batch:
            return sum(w * v for w, v in [*each, *terms])  # type: ignore
        targets = joined([b.targets for b in batches])
        with cf.added_losses() as added:
            loss = self._loss_of(joined(outputs), targets)
        return loss + sum(w * value for w, value in terms) + sum(added.values())

    def _loss_of(self, output: Any, target: Any) -> Tensor:
        lower = self.case.options.get("autocast")
        with torch.autocast("cpu", lower) if lower else nullcontext():
            return number_of(self.program.loss(output, target))

    def step(self, step: int, samples: int | None = None, positions: int = POSITIONS) -> None:
        batches = [batch_of(self.case, step, r, samples, positions) for r in range(self.case.replicas)]
        latest = self._take_old()
        for parameter in self.trained.values():
            parameter.grad = None
        self.program.model.zero_grad()
        share = 1.0
        if self.pending:
            share = 0.5
            (share * self._loss(self.pending, training=True)).backward()
            self.pending = []
        loss = self._loss(batches, training=True)
        (share * loss).backward()
        if latest is not None:
            with torch.no_grad():
                for parameter, value in zip(self.trained.values(), latest, strict=True):
                    parameter.copy_(value)
        if self.clip:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.clip)
        self.optimizer.step()
        if latest is not None:
            self.history.append([p.detach().clone() for p in self.trained.values()])
        self.record.losses[step] = float(loss.detach())

    def _take_old(self) -> list[Tensor] | None:
        if self.stages is None:
            return None
        scheme = registry.find(self.schedule.scheme)
        latest, period = self.history[-1], len(self.history) - 1
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.trained.items()):
                stage = self.stages.get(name, self.schedule.stages - 1)
                version = scheme.version(self.schedule.stages, stage, period)  # type: ignore
                parameter.copy_(self.history[version][number])
        return latest

    def accumulate(self, step: int) -> None:
        """A step without an update, whose gradients the next one uses as well."""
        self.pending = [batch_of(self.case, 30 + step, r) for r in range(self.case.replicas)]

    def failing_step(self, step: int, kind: str) -> None:
        """A step that fails, which the user catches; nothing is updated."""
        self.record.notes.append(f"step {step} fails: {kind}")

    # -- looks

    def evaluate(self, step: int, kind: str = "evaluate") -> None:
        self.pause()
        batches = [batch_of(self.case, 50 + step, r) for r in range(self.case.replicas)]
        with evaluating(self.program.model, self.program.loss):
            self.record.looks[step, kind] = float(self._loss(batches, training=False))

    def predict(self, step: int, kind: str = "predict") -> None:
        self.pause()
        batch = batch_of(self.case, 70 + step, 0)
        count = len(logits_target(batch))
        outputs = []
        with evaluating(self.program.model), cf.added_losses():
            for rows in self._units(count, training=False) if self.case.by_unit else [slice(0, count)]:
                part = Batch(*(rows_of(t, rows) for t in (batch.inputs, batch.targets, batch.kwargs)))
                outputs.append(logits_of(self._call(part)).detach().clone())
        self.record.looks[step, kind] = torch.cat(outputs)

    # -- what the user asks of the training

    def set_rate(self, name: str, value: float) -> None:
        for group in self.optimizer.param_groups:
            group[name] = value

    def forget(self) -> None:
        """Forget the optimizer's momentum."""
        self.optimizer.state.clear()

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        for name, parameter in self.trained.items():
            parameter.requires_grad_(chosen(name))

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.program.model.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.program.model.load_state_dict(state)

    def set_option(self, name: str, value: Any) -> None:
        if name == "clip_norm":
            self.clip = value

    def finish(self) -> None:
        self.record.state = self.state()
        if isinstance(self.program.loss, nn.Module):
            found = copy.deepcopy(self.program.loss.state_dict())
            self.record.state |= {f"loss_function.{n}": v for n, v in found.items()}


def logits_target(batch: Batch) -> Tensor:
    """The tensor of the targets that has a row for each sample."""
    return batch.targets["y"] if isinstance(batch.targets, dict) else batch.targets


class UserError(Exception):
    """An error of the user's own loss function."""


class Staged:
    """Training in a pipeline: a worker of it."""

    def __init__(self, program: Program, record: Record) -> None:
        self.program, self.case, self.record = program, program.case, record
        self.failing = ""
        self.renew()

    def renew(self) -> None:
        case, loss = self.case, self.program.loss

        class Failing:
            """The loss function; at times it fails."""

            def __call__(this, output: Any, target: Any) -> Any:  # noqa: N805
                if self.failing == "error":
                    raise UserError("the user's own")
                found = loss(output, target)
                return number_of(found) + math.inf if self.failing == "inf" else found

        fails = any(name.startswith("caught") for _, name in case.habits)
        options: dict[str, Any] = dict(case.options)
        if case.captured:
            options["example"] = batch_of(case, 0, 0).inputs
        if hasattr(self, "pipeline"):
            self.pipeline.close()
        self.pipeline = cf.Pipeline(
            self.program.model,
            Failing() if fails else loss,
            case.scheme,
            optimizer=partial(optimizer_of, case.optimizer),
            **options,
        )
        self.offset = self.record.step + 1
        for stage, part in self.pipeline.stages.items():
            for layer in part.layers:
                for name, _ in layer.module.named_parameters():
                    self.record.stages[layer.names[name]] = stage

    def _note(self, steps: list[Any]) -> None:
        for made in steps:
            if made.reports_step is not None and not math.isnan(made.loss):
                self.record.losses[self.offset + made.reports_step] = made.loss

    def pause(self) -> None:
        """Wait until all workers have ended what is in flight."""
        self._note(self.pipeline.flush())
        habits = {name for _, name in self.case.habits}
        shared = any("global" in name for name in self.case.features) or "hook of all modules" in habits
        if self.case.model_outside or shared:
            self.pipeline.transport.gather_objects(0)  # threads that have one model, or one global

    def accumulate(self, step: int) -> None:
        batch = batch_of(self.case, 30 + step, self.pipeline.replica)
        self.pipeline.step(batch.inputs, batch.targets, kwargs=batch.kwargs, update=False)

    def step(self, step: int, samples: int | None = None, positions: int = POSITIONS) -> None:
        batch = batch_of(self.case, step, self.pipeline.replica, samples, positions)
        self.offset = step - self.pipeline.steps
        self._note([self.pipeline.step(batch.inputs, batch.targets, kwargs=batch.kwargs)])

    def failing_step(self, step: int, kind: str) -> None:
        batch = batch_of(self.case, 90 + step, self.pipeline.replica)
        self.failing = kind
        if kind == "targets":
            batch = Batch(batch.inputs, rows_of(batch.targets, slice(0, 3)), batch.kwargs)
        try:
            self.pipeline.step(batch.inputs, batch.targets, kwargs=batch.kwargs)
            self.record.notes.append("no error")
        except cf.CounterflowError as error:
            self.record.notes.append(str(error))
        self.failing = ""

    def evaluate(self, step: int, kind: str = "evaluate") -> None:
        batch = batch_of(self.case, 50 + step, self.pipeline.replica)
        found = self.pipeline.evaluate(batch.inputs, batch.targets, kwargs=batch.kwargs)
        self.record.looks[step, kind] = found.loss

    def predict(self, step: int, kind: str = "predict") -> None:
        batch = batch_of(self.case, 70 + step, 0)
        self.record.looks[step, kind] = logits_of(self.pipeline.predict(batch.inputs, kwargs=batch.kwargs))

    def set_rate(self, name: str, value: float) -> None:
        for optimizer in self.pipeline.optimizers.values():
            for group in optimizer.param_groups:
                group[name] = value

    def forget(self) -> None:
        for optimizer in self.pipeline.optimizers.values():
            optimizer.state.clear()

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        self.pipeline.set_trainable(chosen)

    def state(self) -> dict[str, Any]:
        return self.pipeline.model_state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.pipeline.load_model_state_dict(state)

    def set_option(self, name: str, value: Any) -> None:
        setattr(self.pipeline, name, value)

    def finish(self) -> None:
        self.pause()
        self.record.state = self.state()
        self.pipeline.close()


Trainer = Plain | Staged


def drive(program: Program, trainer: Trainer, record: Record) -> None:
    """The user's program."""
    from user_habits import act, around  # noqa: PLC0415 - it imports this module

    case = program.case
    for step in range(case.steps):
        record.step = step
        samples, positions = None, POSITIONS
        for at, name in case.habits:
            if at == step and name == "smaller mini-batch":
                samples = max(2, case.samples - 3)
            elif at == step and name == "longer sequences":
                positions = POSITIONS + 2
            elif at == step:
                trainer.pause()
                record.exercised = step
                act(name, program, trainer, step)
                trainer.pause()
        with ExitStack() as stack:
            for at, name in case.habits:
                if at <= step:
                    around(name, stack)
            trainer.step(step, samples, positions)
        if step in case.looks:
            trainer.evaluate(step)
            trainer.predict(step)
    trainer.finish()


def run_plain(case: Case, **options: Any) -> Record:
    """The program on one process."""
    user_models.restore_globals()
    record = Record()
    program = Program(case)
    drive(program, Plain(program, record, **options), record)
    return record


def _work(case: Case, records: list[Record], program: Program | None) -> None:
    from counterflow.runtime.workers.world import current_transport  # noqa: PLC0415

    record = records[current_transport().rank]
    mine = program or Program(case)
    drive(mine, Staged(mine, record), record)


def run_staged(case: Case, timeout_seconds: float) -> tuple[list[Record], BaseException | None]:
    """The program in a pipeline of threads; what each worker saw, and the error that ended it."""
    user_models.restore_globals()
    workers = schedule_of(case.scheme, {}).workers * case.replicas
    records = [Record() for _ in range(workers)]
    program = Program(case) if case.model_outside else None
    try:
        cf.launch(
            _work,
            case,
            records,
            program,
            workers=workers,
            transport="local",
            timeout_seconds=timeout_seconds,
            threads=1,
        )
    except Exception as error:
        return records, error
    finally:
        user_models.restore_globals()
    return records, None
