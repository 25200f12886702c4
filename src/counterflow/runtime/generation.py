"""Tokens that a model in stages adds to prompts, one after another, each from all before it.

The prompt runs through the pipeline once; then each token alone, with the keys and values, or other states,
that layers left (``stages/remembering.py``). All workers choose the next token of the same logits, so that
they need no other agreement.

Invariant: what is chosen does not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from counterflow.errors import ConfigError

from .messages.values import Unit
from .mini_batch.batch import Batch

if TYPE_CHECKING:
    from .forwards import Forwards

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Logits that are apart by less, relative to the largest, differ by rounding; of other dtypes by 6 %."""


class Sampling:
    """How many tokens are added, and how each is chosen.

    Args:
        tokens: how many.
        temperature: divisor of the logits; 0 chooses the most likely token.
        top_k: how many of the most likely tokens are drawn from; None: all.
        seed: of the draws.
        end: token after which a sample has ended, and is filled with it; None: there is none.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self, *, tokens: int, temperature: float, top_k: int | None, seed: int, end: int | None
    ) -> None:
        if tokens < 0:
            raise ConfigError(f"tokens = {tokens}: must be 0 or more")
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"temperature = {temperature}: must be a finite number, 0 or more")
        if top_k is not None and top_k < 1:
            raise ConfigError(f"top_k = {top_k}: must be 1 or more, or None")
        self.tokens, self.end = tokens, end
        self._temperature, self._top_k = temperature, top_k
        self._draws = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> Tensor:
        """The next tokens, [samples, 1], of logits [samples, vocabulary].

        >>> greedy = Sampling(tokens=1, temperature=0.0, top_k=None, seed=0, end=None)
        >>> greedy.choose(torch.tensor([[0.0, 2.0, 1.0]]))
        tensor([[1]])
        """
        if not self._temperature:
            return logits.argmax(-1, keepdim=True)
        scaled = logits.double() / self._temperature
        if self._top_k is not None and self._top_k < scaled.shape[-1]:
            least = scaled.topk(self._top_k).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        return torch.multinomial(scaled.softmax(-1), 1, generator=self._draws)


def generated(
    pipeline: Forwards,
    prompt: Tensor | None,
    sampling: Sampling,
    run: Callable[[Tensor], Batch],
    *,
    compare: bool,
) -> Tensor:
    """The prompt and the tokens that follow it, [samples, positions + tokens]; all workers call it.

    Args:
        pipeline: the model in stages.
        prompt: as of ``Pipeline.generate``.
        sampling: how tokens are chosen.
        run: predicts with some tokens.
        compare: whether the first token that runs alone is compared with the whole sequence.

    Raises:
        ConfigError: there is no prompt, the output has no logits, or layers make something else of a token
            after others than of all in one piece.
    """
    found = _everywhere(pipeline, prompt)
    length = found.shape[1] + sampling.tokens
    with ExitStack() as stack:
        memories = [stack.enter_context(stage.remembering()) for stage in pipeline.stages.values()]
        following = found
        ended = torch.zeros(len(found), 1, dtype=torch.bool)
        while found.shape[1] < length and not (len(found) and bool(ended.all())):
            logits = _logits(pipeline, run(following))
            if compare and following is not found:
                for memory in memories:
                    memory.paused = True
                _compare(logits, _logits(pipeline, run(found)))
                for memory in memories:
                    memory.paused = False
                compare = False
            following = sampling.choose(logits)
            if sampling.end is not None:
                following = torch.where(ended, sampling.end, following)
                ended = ended | (following == sampling.end)
            found = torch.cat([found, following], 1)
    return torch.cat([found, found[:, -1:].expand(-1, length - found.shape[1])], 1)


def _everywhere(pipeline: Forwards, prompt: Tensor | None) -> Tensor:
    """The replica's prompt, on every worker."""
    mine = prompt.cpu() if isinstance(prompt, Tensor) and 0 in pipeline.stages else None
    rows = cast("Sequence[Tensor | None]", pipeline.transport.gather_objects(mine))
    there = [rows[rank] for rank in pipeline.ranks[pipeline.replica]]
    found = next((each for each in there if each is not None), None)
    if found is None or found.dim() != 2 or found.dtype is not torch.int64 or not found.numel():
        shown = "nothing" if found is None else f"{found.dtype} of shape {(*found.shape,)}"
        raise ConfigError(f"generate needs a prompt [samples, positions] of int64, and was given {shown}")
    return found


def _logits(pipeline: Forwards, batch: Batch) -> Tensor:
    """Logits at the last position, [samples, vocabulary], in the samples' order, on every worker's CPU."""
    outputs = cast("dict[Unit, Any]", batch.outputs)
    mine = {unit: _last_of(output).cpu() for unit, output in outputs.items()}
    rows = cast("list[dict[Unit, Tensor]]", pipeline.transport.gather_objects(mine))
    by_unit: dict[Unit, Tensor] = {}
    for rank in pipeline.ranks[pipeline.replica]:
        by_unit |= rows[rank]
    return torch.cat([by_unit[unit] for unit in sorted(by_unit)])


def _last_of(output: Any) -> Tensor:
    found = output
    if not isinstance(found, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not (isinstance(found, Tensor) and found.dim() == 3 and found.is_floating_point()):
        shown = type(output).__name__
        if isinstance(output, Tensor):
            shown = f"{output.dtype} of shape {(*output.shape,)}"
        raise ConfigError(
            f"generate needs logits [samples, positions, vocabulary], and the last layer gives {shown}"
        )
    return found[:, -1]


def _compare(ours: Tensor, whole: Tensor) -> None:
    """Compare the logits of a token that ran alone after the prompt with those of both in one piece.

    Raises:
        ConfigError: they differ.
    """
    apart, most = float((ours - whole).abs().max()), float(whole.abs().max())
    if not apart <= _ROUNDING.get(ours.dtype, 0.06) * most:
        raise ConfigError(
            f"generate: the logits of a token after the prompt are {apart:.2g} apart from those of both in "
            "one piece; a layer looks at earlier positions, or counts them, without a cf.Carry, from which "
            "it takes what earlier tokens left: let it hold one, or call predict on whole sequences"
        )
