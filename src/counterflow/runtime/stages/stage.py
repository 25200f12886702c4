"""One worker's copy of a stage: its layers, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from counterflow.errors import ConfigError
from counterflow.schedule.modes import Recompute

from ..mesh.parallel import StageModule, fsdp_modules
from ..messages.mappings import know
from ..messages.values import Keyworded, Value
from ..mini_batch.counted import Means
from ..torch_private import buffers_of
from .deferred import SUMS, Deferred
from .named_layer import LOSS, NamedLayer
from .precision import Precision
from .randomness import RandomStreams, SampleRows, versions
from .reading import Reads
from .recomputation import Buffers, First, Hold, InputGuard, Replay, mapped, tensors_of
from .skips import Carried, SkipRunner, StageSkips
from .split_backward import Joints, Splitting
from .versions import Versions

_NOTHING = nullcontext()
_NOWHERE: frozenset[int] = frozenset()


class StageCopy:
    """The layers of one stage on one worker.

    Args:
        stage: its number.
        layers: its layers, on the worker's device.
        loss: the last stage's loss function, if that is a module.
        streams: where random draws come from.
        recompute: what is computed again in the backward.
        last: whether it is the last one.
        precision: makes, of the stage, the precision in which its layers run.
        skips: what its layers save and load.
        means: watches what gives the loss; None: nothing is watched.
    """

    def __init__(
        self,
        stage: int,
        layers: Sequence[NamedLayer],
        streams: RandomStreams,
        recompute: Recompute,
        *,
        loss: NamedLayer | None = None,
        last: bool = False,
        precision: Callable[[StageCopy], Precision] = lambda _: Precision(),
        skips: StageSkips | None = None,
        means: Means | None = None,
    ) -> None:
        self.stage = stage
        self.means = means
        self.last = last
        self.skips = skips
        modules = {layer.index: layer.module for layer in layers}
        self._skip_runner = None if skips is None else SkipRunner(skips, modules)
        self.layers = tuple(layers)
        self.with_weights = self.layers if loss is None else (*self.layers, loss)
        """Whatever has weights: the layers, and a loss function with weights of its own."""
        self._evaluates = False
        self.streams = streams
        self.recompute = recompute
        self.hold: Hold | None = None
        """In a forward: notes what is kept to compute layers again."""
        self.joints: Joints | None = None
        """In a forward whose backward is split: where its graph is joined."""
        self.recount: Callable[[], Hold] | None = None
        """In a backward: forgets what the layer recomputed last kept, and gives what notes the next one's."""
        self.versions: Versions | None = None
        """Of its weights, in schemes without a flush."""
        self.checked = False
        """Whether ``check_graph`` has seen the stage's graph."""
        self.trains = any(p.requires_grad for p in self.parameters())
        self.module: StageModule | None = None
        """Has the hooks of a stage whose weights are sharded over further dimensions of the mesh."""
        self.entry = InputGuard()
        self.buffers = Buffers(layer.module for layer in self.with_weights)
        self.splitting = Splitting(stage, self._constant, direct=streams.device.type == "cpu")
        """For backwards that are split."""
        self.splits = False
        """Whether any are."""
        self._watched = False
        """Whether it is seen what hooks the forward at hand registers."""
        self.joins: bool | None = None if skips is None else False
        """Whether samples give the same in one run with others; None: not tried."""
        self._entries = [InputGuard() for _ in layers]
        self._compared: dict[int | None, int] = {}
        """By layer, or None for the stage, the step in which a run was last compared with its backward's."""
        self._layer_buffers = [Buffers([layer.module]) for layer in layers]
        self.precision = precision(self)

    @property
    def may_be_joined(self) -> bool:
        """Whether the graph of a forward whose backward is split has to be watched: see ``Joints``."""
        return self.recompute is Recompute.LAYER or self.splitting.joined != _NOWHERE

    @property
    def statistics(self) -> list[Tensor]:
        """Running statistics of batch norms."""
        found = [buffers_of(module)[name] for module, name in self.buffers.norms if name != SUMS]
        return [buffer for buffer in found if buffer is not None]

    @property
    def deferred(self) -> list[Deferred]:
        """Batch norms whose running statistics are updated when a mini-batch ends."""
        return [
            module for module, name in self.buffers.norms if name == SUMS and isinstance(module, Deferred)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        found = [p for layer in self.with_weights for p in layer.module.parameters()]
        return list({id(parameter): parameter for parameter in found}.values())

    def _constant(self) -> list[Tensor]:
        """What is there whether the stage runs or not."""
        buffers = [buffer for layer in self.with_weights for buffer in layer.module.buffers()]
        return [*self.parameters(), *buffers]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this context the modules are in evaluation mode and layers draw no keyed random numbers."""
        self._evaluates = True
        try:
            with evaluating([layer.module for layer in self.with_weights]):
                yield
        finally:
            self._evaluates = False
            self.end_gathering()

    def hang_in(self, module: StageModule) -> None:
        """Run within a module whose hooks see to weights that are sharded."""
        self.module = module
        self.joins = False  # its collectives must not depend on the samples

    def end_gathering(self) -> None:
        """Let the modules have their shards as parameters, where FSDP has gathered whole ones."""
        if self.module is not None:
            for module in fsdp_modules(self.module):
                module.reshard()

    def forward(self, value: Value, step: int, rows: SampleRows) -> Value:
        """The stage's output on some rows, in the mode that autograd is in.

        Where it takes or gives skips, its input or output is ``Carried``.
        """
        if self.splits:
            # Layers that torch compiles have hooks of their own.
            graph = torch.is_grad_enabled() and not self.streams.compiled
            self._watched = graph and self.splitting.hooks.watches(step)
            if self._watched:
                with self.splitting.hooks:
                    return self._forward_whole(value, step, rows)
        return self._forward_whole(value, step, rows)

    def _forward_whole(self, value: Value, step: int, rows: SampleRows) -> Value:
        if self.module is None:
            return self._with_skips(value, step, rows)
        return self.module.output(partial(self._with_skips, step=step, rows=rows), value)

    def _with_skips(self, value: Value, step: int, rows: SampleRows) -> Value:
        return self.left(self._forward(self.entered(value), step, rows))

    def entered(self, value: Value) -> Value:
        """The stage's input as its first layer takes it."""
        if self.stage == 0:
            value = self.precision.given(value)
        return value if self._skip_runner is None else self._skip_runner.entered(value)

    def left(self, given: Value) -> Value:
        """What the last layer gave as the stage's output."""
        if self.last:
            given = self.precision.made(given)
        return given if self._skip_runner is None else self._skip_runner.left(given)

    def _forward(self, value: Value, step: int, rows: SampleRows) -> Value:
        if self.recompute is Recompute.LAYER and torch.is_grad_enabled():
            return self._forward_by_layer(value, step, rows)
        for number, layer in enumerate(self.layers):
            if number and self.joints is not None:
                value = self.joints.before(number, value)
            value = self._run(layer, value, step, rows)
        return value

    def forward_apart(self, value: Value, step: int, rows: SampleRows) -> Value:
        """The stage's output, and all buffers as they were."""
        with self.buffers.as_then(self.buffers.now()):
            return self.forward(self.entry.given(value), step, rows)

    def layer_apart(self, number: int, value: Value, step: int, rows: SampleRows) -> Value:
        """The output of one layer, of those of the stage, and all buffers as they were."""
        with self.buffers.as_then(self.buffers.now()):
            return self._run(self.layers[number], self._entries[number].given(value), step, rows)

    def forward_joined(self, value: Value) -> Value | None:
        """The output for the samples of several units; None if it is not theirs one by one.

        It is not if it draws, keeps statistics or changes a buffer; nor where Python reads what is in a
        tensor, as it may decide by it.
        """
        if self.buffers.norms:
            return None
        before = self.buffers.now()

        def run() -> Value:
            joined = self.entered(value)
            for layer in self.layers:
                joined = layer.module(joined)
            return self.left(joined)

        with _NOTHING if self.joins else Reads() as reads:
            output = self.streams.unless_drawn(run)
        if self.buffers.now() is not before:
            self.buffers.restore(before)
            return None
        return None if reads is not None and reads.any else output

    def loss(
        self, function: Callable[[Any, Any], Any], output: Any, target: Any, step: int, rows: SampleRows
    ) -> Any:
        """What a loss function makes of the last stage's output; it draws as a layer does."""
        run = partial(_of_pair, function)
        watching = self.splitting.hooks if self._watched and torch.is_grad_enabled() else _NOTHING
        with _NOTHING if self.means is None else self.means.watching(), watching:
            if self._evaluates:
                return function(output, target)
            return self.streams.run(run, (output, target), index=LOSS, step=step, rows=rows)

    def loss_apart(self, function: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
        """The same without a graph, and random state and all buffers as they were.

        Raises:
            ConfigError: it draws random numbers, so that it would be another the next time.
        """
        then = self.buffers.now()
        watching = _NOTHING if self.means is None else self.means.watching()
        with torch.no_grad(), self.streams.kept(), self.buffers.as_then(then), watching:
            found = self.streams.unless_drawn(lambda: (function(output, target),))
        if self.buffers.now() is not then:
            self.buffers.restore(then)
        if found is None:
            raise ConfigError("it draws random numbers")
        return found[0]

    def _run(self, layer: NamedLayer, value: Value, step: int, rows: SampleRows) -> Value:
        module: Any = layer.module
        if type(value) is Keyworded or (type(value) is Carried and type(value.value) is Keyworded):
            module = _Keywords(layer.module)
        if self._skip_runner is not None:
            module = partial(self._skip_runner.run, layer.index, module)
        value = self.precision.entering(value)
        watched = self.means is not None and self.means.in_layer == layer.index
        with self.means.watching() if watched and self.means is not None else _NOTHING:
            if self._evaluates:
                return module(value)
            output = self.streams.run(module, value, index=layer.index, step=step, rows=rows)
        if not self.checked:
            know(output)
        return output

    def _forward_by_layer(self, value: Value, step: int, rows: SampleRows) -> Value:
        """The same with the input alone kept of each layer."""
        watched: list[tuple[InputGuard, Value, list[int], Replay]] = []
        of_each = zip(self.layers, self._entries, self._layer_buffers, strict=True)
        for number, (layer, entry, buffers) in enumerate(of_each):
            replay = self._replay(layer, step, rows, buffers)
            if self.joints is not None:
                self.joints.replays.append(replay)
                if number:
                    value = self.joints.before(number, value)
            same = mapped(_itself, value)  # the layer may change what its tensors are in
            if entry.changes is None:
                watched.append((entry, same, versions(same), replay))
            hold = None if self.hold is None else partial(_hold_all, self.hold, same)
            replay.keep(entry.kept(same), changes=entry.changes is not False, hold=hold)
            with replay.watch():
                value = self._run(layer, value, step, rows)
            replay.first = self.first_run(tensors_of(value), step, layer.index)
        for entry, given, before, replay in watched:
            entry.learn(given, before)
            if not entry.changes:
                replay.keep(given, changes=False)
        return value

    def first_run(self, tensors: Sequence[Tensor], step: int, layer: int | None = None) -> First | None:
        """What is compared with the run of the backward: one run a step, whole the first time.

        On a GPU, where comparing waits for the device, in fewer and fewer steps.
        """
        last = self._compared.get(layer)
        if last == step:
            return None
        self._compared[layer] = step
        if last is not None and self.streams.device.type != "cpu" and step & (step - 1):
            return None
        return First(tensors, whole=last is None)

    def _replay(self, layer: NamedLayer, step: int, rows: SampleRows, buffers: Buffers) -> Replay:
        then = buffers.now()

        def again(value: Value) -> Value:
            with self.precision.computing(), buffers.as_then(then):
                return self._run(layer, value, step, rows)

        place = f"layer {layer.index} ({type(layer.module).__name__})"
        return Replay(place, again, lambda: self.recount() if self.recount is not None else None)


class _Keywords(nn.Module):
    """Calls a layer with keyword arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Keyworded) -> Value:
        if value.positional is None:
            return self.layer(**value.kwargs)
        return self.layer(value.positional, **value.kwargs)


def _of_pair(function: Callable[[Any, Any], Any], pair: tuple[Any, Any]) -> Any:
    return function(*pair)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _hold_all(hold: Hold, value: Value) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            hold(leaf)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context modules are in evaluation mode; after it each is in the one it had before."""
    given = [(module, module.training) for module in modules]
    modes = [(child, child.training) for module, _ in given for child in module.modules()]
    try:
        for module, _ in given:
            module.eval()
        yield
    finally:
        for module, mode in given:
            module.train(mode)  # some do more than to note it
        for child, mode in modes:
            child.training = mode
