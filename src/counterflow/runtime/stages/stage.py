"""One worker's copy of a stage: its layers, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from counterflow.api.experts import TokenBalance
from counterflow.common.probe_flag import PROBING
from counterflow.common.tensors.torch_private import buffers_of
from counterflow.schedule.modes import Recompute
from counterflow.verification.diagnosis.reruns import RerunDiagnosis

from ..mesh.parallel import StageModule, fsdp_modules, gathered_parameters
from ..messages.values import Value
from ..mini_batch.mean_losses import UNWATCHED, MeanLossDetector
from .aux_loss import AuxLossCollector, split_aux_losses
from .buffers import Buffers
from .captures import Captures
from .compiled import Backend, Compiled, CompiledLayers, Drawing
from .context_guard import ContextGuard
from .deferred import SUMS, Deferred
from .detach_points import DetachPoints
from .evaluation_mode import evaluating
from .generation_cache import GenerationCache
from .host_reads import HostReadDetector
from .input_guard import InputCopies, InputGuard
from .mapping_registration import MAPPINGS
from .named_layer import LOSS, NamedLayer
from .passes import EmptyPass, GuardedPass, Head, PlainPass, RawHead, SplitPass, StagePass
from .precision import CastStage, Precision
from .randomness import RandomStreams
from .replays import LayerReplays
from .sample_rows import SampleRows
from .saved_bytes import SavedBytes
from .skip_links import StageSkips
from .skip_runs import PassBy, SkipRunner
from .sliced_pass import GraphPassMaker, PassMaker, pass_maker
from .split_backward import SplitBackwardPlanner
from .stage_wrappers import Run, StageWrapper, blocks, called, called_loss, composed, layer_run
from .versions import Versions

_NOTHING = nullcontext()
_NO_LAYERS: frozenset[int] = frozenset()
RAW = RawHead()
NOT_COUNTED = SavedBytes([], counting=False)
"""Count of no bytes, for passes beside the steps."""

_LOSS = NamedLayer(LOSS, {}, nn.Identity())


class LocalStage:
    """The layers of one stage on one worker.

    Its runs (``run_layers``, ``run_loss``) are composed of its wrappers, again whenever these change.

    Args:
        stage: number of the stage.
        layers: layers on the worker's device.
        loss: loss function of the last stage, if it is a module.
        streams: random streams.
        recompute: recomputation in the backward.
        last: True for the last stage.
        precision: makes, of the stage, the precision in which its layers run.
        skips: skips that its layers save and load.
        means: detector of means in the last stage's loss.
    """

    run_layers: Run
    """Function of a stage's input to its output; if it accepts or returns skips, these are ``Carried``."""
    # Set by ``_compose`` for the steps, and replaced for a time by evaluations, checks and measurements.
    run_loss: Run
    """Function of (loss function, output of the last stage, target) to the loss; it draws as a layer does."""

    def __init__(
        self,
        stage: int,
        layers: Sequence[NamedLayer],
        streams: RandomStreams,
        recompute: Recompute,
        *,
        loss: NamedLayer | None = None,
        last: bool = False,
        precision: Callable[[CastStage], Precision] = lambda _: Precision(),
        skips: StageSkips | None = None,
        means: MeanLossDetector = UNWATCHED,
    ) -> None:
        self.stage = stage
        self.means = means
        self.last = last
        self.skips = skips
        self.layers = tuple(layers)
        self.with_weights = self.layers if loss is None else (*self.layers, loss)
        """The layers, and a loss function that is a module."""
        self.streams = streams
        self.recompute = recompute
        self.versions: Versions | None = None
        """Versions of the weights, in asynchronous schemes."""
        self.checked = False
        """True if the stage's first graph was diagnosed."""
        self.trains = any(p.requires_grad for p in self.parameters())
        self.module: StageModule | None = None
        """Module with the hooks of weights that are sharded over further dimensions of the mesh."""
        self.context_guard: ContextGuard | None = None
        """Wrapper of layers that are given shares of sequences."""
        self.entry = InputGuard()
        self.buffers = Buffers(layer.module for layer in self.with_weights)
        self.balances = [m for m, n in self.buffers.places if n == "bias" and isinstance(m, TokenBalance)]
        """Biases of routers, which are moved after an update."""
        direct, first = streams.device.type == "cpu", self.layers[0].index
        self.split_planner = SplitBackwardPlanner(stage, self.constant, direct=direct, first=first)
        self.runs_empty = False
        """True if layers run without samples too, since they communicate with those at other positions."""
        self._splits = False
        self._compiled: Compiled | None = None
        self.captures: Captures | None = None
        self._drawing = Drawing(streams, self._compose)
        self.aux_losses = AuxLossCollector()
        self.joins: bool | None = None if skips is None else False
        """True if outputs are row-independent (a joined run equals single runs); None: unknown."""
        self.reruns = RerunDiagnosis(streams.device)
        self.precision = precision(self)
        self.replays: LayerReplays | None = None
        """Replays of the layers, if these are recomputed one by one."""
        if by_layer := recompute is Recompute.LAYER:
            computing = self.precision.computing
            self.replays = LayerReplays(self.layers, streams.device, computing, self.split_planner.note)
        self._generation_cache: GenerationCache | None = None
        self._skip_runner = None if skips is None else SkipRunner(skips, self.layers, by_layer=by_layer)
        self._pass_by = None if skips is None else PassBy(skips, self.layers)
        self._compose()

    def layer_runs(self) -> list[tuple[NamedLayer, Run, Sequence[int]]]:
        """Return each layer, its run without the stage's wrappers, and the numbers of its carried states."""
        numbers = [() for _ in self.layers] if self.skips is None else [x.carries for x in self.skips.layers]
        precision = None if self.precision.plain else self.precision
        wrappers = _present(InputCopies(), precision, self._pass_by, self._skip_runner)
        runs = [layer_run(layer, partial(called, layer.module), wrappers) for layer in self.layers]
        return list(zip(self.layers, runs, numbers, strict=True))

    def _compose(self) -> None:
        # A new wrapper has its place here, outermost first, and in ``layer_runs``, ``uncompiled`` and
        # ``loss_of_step`` if checks and the witness have to run layers within it.
        precision = None if self.precision.plain else self.precision
        compiles = self._compiled is not None
        hooks = self.split_planner.hooks if self._splits and not compiles else None
        joins = self._compiled is not None and self._compiled.splits
        split_planner = self.split_planner if self._splits and not joins else None
        mappings = None if self.checked else MAPPINGS
        inner = [self.module, self.context_guard, precision, self.means]
        streams = self._drawing if compiles else self.streams
        self.wrappers = _present(mappings, *inner, streams, self._skip_runner, self.captures)
        """Wrappers of the layers in all runs of a step."""
        self._evaluation_wrappers = _present(
            self.aux_losses, self._pass_by, *inner, self._skip_runner, self._generation_cache
        )
        self._evaluation_run = composed(self.layers, self._evaluation_wrappers, self._compiled)
        entry = None if self.entry.changes is False and self.checked else self.entry
        self._training_wrappers = self._with_common(
            _present(entry, hooks, split_planner), _present(self.replays)
        )
        self.run_layers = composed(self.layers, self._training_wrappers, self._compiled)
        self._evaluation_loss = layer_run(_LOSS, called_loss, _present(self.context_guard, self.means))
        loss_wrappers = _present(self.context_guard, self.means, hooks, self.streams)
        self.run_loss = layer_run(_LOSS, called_loss, loss_wrappers)

    @contextmanager
    def isolated(
        self, *, splits: bool = False, layer_wrappers: Sequence[StageWrapper] = ()
    ) -> Iterator[None]:
        """Context of passes beside the steps: nothing is recomputed, buffers and draws stay.

        Args:
            splits: True if graphs have the detach points of a split backward.
            layer_wrappers: wrappers of each layer, within all others.
        """
        outer = [InputGuard(), *_present(self.split_planner if splits else None)]
        run = composed(self.layers, self._with_common(outer, layer_wrappers), self._compiled)

        def run_isolated(value: Value, step: int, rows: SampleRows) -> Value:
            unchanged = self.buffers.swapped_in(self.buffers.snapshot())
            with self.streams.step(), self.precision.computing(), unchanged:
                output = run(value, step, rows)
            self.run_layers = run_isolated  # compiled layers that draw have the stage composed again
            return output

        before = self.run_layers, self.checked
        self.run_layers, self.checked = run_isolated, True
        try:
            yield
        finally:
            self.run_layers, self.checked = before

    @contextmanager
    def uncompiled(self, layer_wrappers: Sequence[StageWrapper] = ()) -> Iterator[None]:
        """Context of passes with the draws of a step, without recomputation and without compiled code.

        Args:
            layer_wrappers: wrappers of each layer, within all others.
        """
        precision = None if self.precision.plain else self.precision
        outer = _present(AuxLossCollector(), self._pass_by, self.module, precision, self.means, self.streams)
        before = self.run_layers
        self.run_layers = composed(self.layers, [*outer, *_present(self._skip_runner), *layer_wrappers])
        try:
            yield
        finally:
            self.run_layers = before

    def output(self, value: Value, step: int, rows: SampleRows) -> Value:
        """Return the output of some rows; nothing is saved for a backward."""
        return StagePass(self, rows, step, RAW, NOT_COUNTED).forward([], value)[0]

    def loss_of_step(
        self, value: tuple[Callable[[Any, Any], Any], Any, Any], step: int, rows: SampleRows
    ) -> Any:
        """Return the loss of (loss function, output, target), with the draws of a step."""
        return layer_run(_LOSS, called_loss, _present(self.means, self.streams))(value, step, rows)

    def _with_common(
        self, outer: Sequence[StageWrapper], inner: Sequence[StageWrapper]
    ) -> list[StageWrapper]:
        return [self.aux_losses, *outer, *_present(self._pass_by), *inner, *self.wrappers]

    @property
    def statistics(self) -> list[Tensor]:
        """Running statistics of batch norms."""
        buffers = [buffers_of(module)[name] for module, name in self.buffers.norms if name != SUMS]
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def has_skips(self) -> bool:
        """True if values go around the layers, by skip connections or from slice to slice."""
        return self.skips is not None

    @property
    def deferred(self) -> list[Deferred]:
        """Batch norms whose running statistics are updated when a mini-batch ends."""
        return [norm for norm, name in self.buffers.norms if name == SUMS and isinstance(norm, Deferred)]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        parameters = [p for layer in self.with_weights for p in layer.module.parameters()]
        return list({id(parameter): parameter for parameter in parameters}.values())

    def graph_leaves(self) -> list[Tensor]:
        """Return tensors beside the parameters where graphs end: cast ones, and those gathered for an op."""
        gathered = () if self.module is None else gathered_parameters(self.module)
        return [*self.precision.masters, *gathered]

    def constant(self) -> list[Tensor]:
        """Return the tensors that the stage occupies between steps."""
        buffers = [buffer for layer in self.with_weights for buffer in layer.module.buffers()]
        return [*self.parameters(), *buffers]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the modules are in evaluation mode and layers draw no keyed random numbers."""
        training, divides = (self.run_layers, self.run_loss), self.means.divides
        self.run_layers, self.run_loss = self._evaluation_run, self._evaluation_loss
        self.means.divides = True  # nothing is updated before all is known
        try:
            with evaluating([layer.module for layer in self.with_weights]):
                yield
        finally:
            self.run_layers, self.run_loss = training
            self.means.divides = divides
            self.end_gathering()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Context in which the stage is in evaluation mode, without compiled code; buffers stay."""
        contents, token = self.buffers.snapshot(), PROBING.set(True)
        try:
            with self.evaluating():
                self.run_layers = composed(self.layers, self._evaluation_wrappers)
                yield
        finally:
            PROBING.reset(token)
        if self.buffers.snapshot() is not contents:
            self.buffers.restore(contents)

    @contextmanager
    def generating(self) -> Iterator[GenerationCache]:
        """Context in which an evaluation continues from the states that layers left in the previous one."""
        self._generation_cache = GenerationCache(self.layers)
        self._compose()
        try:
            with self._generation_cache.active():
                yield self._generation_cache
        finally:
            self._generation_cache = None
            self._compose()

    def split(self) -> None:
        """Split all further backwards."""
        self._splits = True
        self._compose()

    def compile(self, backend: Backend) -> None:
        """Compile the layers with torch's compiler, which has hooks of its own."""
        self._compiled = Compiled(self.stage, backend)
        if self._compiled.splits:
            self.split_planner.join_layers()
        self.split_planner.watches_hooks = False
        self._compose()

    def compiled_layers(self) -> tuple[CompiledLayers, ...]:
        """Layers that are compiled as one function in training; empty: the stage is not compiled."""
        if self._compiled is None:
            return ()
        return self._compiled.report(blocks(self.layers, self._training_wrappers))

    def attach_module(self, module: StageModule) -> None:
        """Run the layers in a module whose hooks gather sharded weights."""
        self.module = module
        if module.context is not None:
            self.context_guard = ContextGuard(module.context, self)
        self.joins = False  # its collectives must not depend on the samples
        if module.fsdp_sum is not None:
            self.split_planner.run_whole(module.fsdp_sum.gathered)
        self._compose()

    @staticmethod
    def graph_pass(*, splits: bool = False) -> GraphPassMaker:
        """Return the maker of passes that save their graph.

        Args:
            splits: True if the backward of a unit may be two ops.
        """
        return SplitPass if splits else PlainPass

    def pass_maker(self, *, splits: bool, sliced: bool) -> PassMaker:
        """Return the maker of the passes of an op's units in training.

        Args:
            splits: True if the backward of a unit may be two ops.
            sliced: True if a unit is a slice of a sequence.
        """
        captures = self.captures
        captured = None if captures is None else captures.graph_pass(splits=splits, sliced=sliced)
        graph_pass = captured or self.graph_pass(splits=splits)
        return pass_maker(graph_pass, sliced=sliced, recomputed=self.recompute is Recompute.STAGE)

    def begin(self, rows: SampleRows, step: int, head: Head, meter: SavedBytes, make: PassMaker) -> StagePass:
        """Begin the pass of a unit in training.

        Args:
            rows: samples of the unit.
            step: number of the step.
            head: function after the layers.
            meter: count of the bytes that are saved for backwards.
            make: maker of the pass, by ``pass_maker``.
        """
        if rows.start == rows.stop and not self.runs_empty:
            return EmptyPass(self, rows, step, head, meter)
        return make(self, rows, step, head, meter)

    def begin_evaluation(
        self, rows: SampleRows, step: int, head: Head, meter: SavedBytes, *, guarded: bool = False
    ) -> StagePass:
        """Begin the pass of a unit without gradients.

        Args:
            rows: samples of the unit.
            step: number of the step.
            head: function after the layers.
            meter: count of the bytes that are saved for backwards.
            guarded: True if a unit of which a layer fails counts as empty.
        """
        if rows.start == rows.stop and not self.runs_empty:
            return EmptyPass(self, rows, step, head, meter)
        return (GuardedPass if guarded else StagePass)(self, rows, step, head, meter)

    def backward_context(self, meter: SavedBytes) -> AbstractContextManager[Any] | None:
        """Return the context of a backward; None: it needs none.

        Args:
            meter: count of the bytes that are saved for backwards.
        """
        replays = self.replays if meter.counting else None
        fsdp_sum = None if self.module is None else self.module.fsdp_sum
        gathers = fsdp_sum is not None and fsdp_sum.gathers
        if self.precision.plain and replays is None and not gathers:
            return self.streams.backward() if self.streams.shared else None
        context = ExitStack()
        if fsdp_sum is not None and gathers:  # gradients come by other ways than outputs
            context.enter_context(fsdp_sum.gathered())
        if replays is not None:
            context.enter_context(replays.counted(meter))
        context.enter_context(self.streams.backward())
        context.enter_context(self.precision.backward())
        return context

    def sum_fsdp_gradients(self) -> None:
        """Sum gradients that FSDP left whole, after a step's last op that makes gradients of weights."""
        if self.module is not None:
            self.module.sum_gradients()

    def discard_gradients(self) -> None:
        """Drop gradients that FSDP left whole, of passes beside a step."""
        if self.module is not None and self.module.fsdp_sum is not None:
            self.module.fsdp_sum.discard()

    def note_checked(self) -> None:
        """Note that the first graph is diagnosed, and that the values that layers pass on are known."""
        self.checked = True
        self._compose()

    def end_gathering(self) -> None:
        """Replace the whole parameters that FSDP has gathered by their shards."""
        if self.module is not None:
            for module in fsdp_modules(self.module):
                module.reshard()

    def detaching(self) -> AbstractContextManager[DetachPoints | None]:
        """Context of a forward whose backward is split; it records detach points."""
        detaches = self.replays is not None or self.split_planner.detached_layers != _NO_LAYERS
        return self.split_planner.detaching() if detaches else _NOTHING

    def forward_joined(self, value: Value, step: int, rows: SampleRows) -> Value | None:
        """Run several units as one; None if the stage is not row-independent.

        It is not if it draws, keeps statistics, changes a buffer, or reads a tensor in Python, on which it
        may branch.
        """
        if self.buffers.norms:
            return None
        before = self.buffers.snapshot()
        with _NOTHING if self.joins else HostReadDetector() as reads:
            output = self.streams.unless_drawn(lambda: self._evaluation_run(value, step, rows))
        if self.buffers.snapshot() is not before:
            self.buffers.restore(before)
            return None
        if split_aux_losses(output)[1]:  # what layers add to the loss is of all samples together
            return None
        return None if reads is not None and reads.detected else output


def _present(*wrappers: StageWrapper | None) -> list[StageWrapper]:
    return [wrapper for wrapper in wrappers if wrapper is not None]
