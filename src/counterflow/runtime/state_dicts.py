"""States of the model and of the training: returned, streamed, averaged and loaded.

Invariant: what asks other workers is called by all of them, and reaches them as an error if it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from counterflow.errors import ConfigError

from .call_guard import CallGuard
from .drain import Drain
from .mini_batch.refusal import refusing
from .mini_batch.step_report import CallKind
from .parameters.local_state import LocalState
from .parameters.state_records import BY_STAGE, ParameterState
from .parameters.weights import Weights
from .stages.randomness import RandomStreams
from .transport.base import Transport


class StateDicts:
    """States of one worker's pipeline; the methods are those of ``Pipeline``, which documents them.

    Args:
        guard: guard of the pipeline's calls, with the number of steps.
        drain: what is in flight, which ends first.
        weights: the worker's weights.
        local_state: the worker's part of the state.
        streams: random streams, whose seed is a part of the state.
        transport: transport to the other workers.
        order: names in the model's own ``state_dict``.
        forget: forgets the shapes of earlier mini-batches, which depend on what is trained.
    """

    def __init__(
        self,
        guard: CallGuard,
        drain: Drain,
        weights: Weights,
        local_state: LocalState,
        *,
        streams: RandomStreams,
        transport: Transport,
        order: Sequence[str],
        forget: Callable[[], None],
    ) -> None:
        self._guard, self._drain, self._weights, self._local = guard, drain, weights, local_state
        self._streams, self._transport, self._forget = streams, transport, forget
        self._order = {name: number for number, name in enumerate(order)}

    def start_ema(self, decay: float) -> None:
        """Start the average of the weights."""
        self.settle("ema")
        with self._guard.reported():
            self._guard.agree(CallKind.EMA)
            with refusing():  # on all workers
                self._weights.follow(decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the weights are their averages."""
        self._guard.require_original_weights("averaged()")
        self._drain.settle()
        with ExitStack() as stack:
            with self._guard.reported():
                self._guard.agree(CallKind.AVERAGED)
                stack.enter_context(self._weights.averaged())
            self._guard.averaged = True
            try:
                yield
            finally:
                self._guard.averaged = False

    def model(self, *, rank: int | None = None, local: bool = False, ema: bool = False) -> dict[str, Any]:
        """State of the model."""
        if local:
            self._guard.require_idle("model_state_dict(local=True)")
            with self._weights.averaged() if ema else nullcontext():
                return self._local.state_dict()
        with self._guard.reported():
            state = dict(self._streamed(rank, ema=ema))
        return dict(sorted(state.items(), key=lambda item: self._order.get(item[0], len(self._order))))

    @contextmanager
    def local_weights(self, *, ema: bool = False) -> Iterator[dict[Sequence[str], Any]]:
        """Context with the weights of this worker as they are."""
        self._guard.require_idle("local_weights()")
        with self._weights.averaged() if ema else nullcontext():
            yield self._local.weights()

    def stream(self, rank: int, *, ema: bool) -> Iterator[tuple[str, Any]]:
        """State of the model, name by name on one rank."""
        with self._guard.reported():
            pairs = self._streamed(rank, ema=ema)
            if self._transport.rank != rank:
                return iter(list(pairs))
            self._guard.streams = True
        return self._consumed(pairs)

    def _streamed(self, rank: int | None, *, ema: bool) -> Iterator[tuple[str, Any]]:
        if rank is not None and not 0 <= rank < self._transport.world_size:
            raise ConfigError(f"rank={rank}; there are ranks 0 to {self._transport.world_size - 1}")
        self._guard.require_original_weights("the state")
        self._drain.settle()
        self._guard.agree(CallKind.STATE_DICT)
        self._weights.check_copies(f"after {self._guard.steps} steps")
        return self._averages(rank) if ema else self._local.stream(rank)

    def _averages(self, rank: int | None) -> Iterator[tuple[str, Any]]:
        with self._weights.averaged():
            yield from self._local.stream(rank)

    def _consumed(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        try:
            while (pair := self._next(pairs)) is not None:
                yield pair
        finally:
            while self._next(pairs) is not None:
                pass
            self._guard.streams = False

    def _next(self, pairs: Iterator[tuple[str, Any]]) -> tuple[str, Any] | None:
        with self._guard.reported(taking=True):
            return next(pairs, None)

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load the weights of this worker."""
        self._guard.require_idle("load_model_state_dict")
        self._local.prepare_model(state)()

    def training(self, *, rank: int | None = None, local: bool = False) -> dict[str, Any]:
        """State that a training resumes from."""
        self._guard.require_no_pending_gradients("state_dict")
        model = self.model(rank=rank, local=local)
        with self._guard.reported():
            state = self._local.training_state() if local else self._local.whole_training_state(rank)
        if not local and rank not in (None, self._transport.rank):
            return {}
        optimizer = {name: ParameterState(**parts) for name, parts in state.pop("optimizer").items()}
        stages = {kind: _with_keys(str, state.pop(kind)) for kind in BY_STAGE if kind in state}
        return {
            "model": model,
            "optimizer": optimizer,
            **stages,
            **state,
            "step": self._guard.steps,
            "seed": self._streams.seed,
        }

    def load_training(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``training`` returned."""
        self._guard.require_no_pending_gradients("load_state_dict")
        if missing := [
            name for name in ("model", "optimizer", "scheduler", "step", "seed") if name not in state
        ]:
            raise ConfigError(
                f"the state has no {missing[0]!r}: load_state_dict resumes from what state_dict() returned; "
                "a model's weights alone are loaded by load_model_state_dict"
            )
        self._guard.require_idle("load_state_dict")
        stages = {kind: _with_keys(int, state[kind]) for kind in BY_STAGE if kind in state}
        loads = self._local.prepare_model(state["model"]), self._local.prepare_training({**state, **stages})
        for load in loads:
            load()
        self._guard.steps, self._streams.seed = state["step"], state["seed"]

    def set_trainable(self, chosen: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters."""
        self.settle("set_trainable")
        with self._guard.reported():
            self._guard.agree(CallKind.SET_TRAINABLE)
            self._weights.set_trainable(chosen)
            self._forget()

    def settle(self, call: str) -> None:
        """End what is in flight, for a call that needs no gradients to wait for an update."""
        self._guard.require_no_pending_gradients(call)
        self._drain.settle()


def _with_keys(kind: Callable[[Any], Any], by_stage: Mapping[Any, Any]) -> dict[Any, Any]:
    # Keys as texts: torch.distributed.checkpoint accepts no others.
    return {kind(stage): value for stage, value in by_stage.items()}
