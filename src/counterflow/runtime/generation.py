"""Tokens that a model in stages adds to prompts, one after another, each from all before it.

The prompt runs through the pipeline once; then each token alone, with the keys and values, or other states,
that layers left (``stages/generation_cache.py``). All workers choose the next token of the same logits, so
they need no other agreement.

Invariant: what is chosen does not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from counterflow.common.doubling import is_doubling
from counterflow.errors import ConfigError
from counterflow.verification.diagnosis.comparison import distance
from counterflow.verification.diagnosis.tolerances import ACTIVATIONS

from .execution.step import Workers
from .messages.values import Unit
from .mini_batch.batch import Batch
from .mini_batch.step_report import CallKind
from .stages.stage import LocalStage


class Settings(NamedTuple):
    """Arguments of a ``Sampling``, in which the workers of a replica agree."""

    tokens: int
    temperature: float
    top_k: int | None
    seed: int
    end: int | None


class Sampling:
    """Number of tokens to generate, and the choice of each.

    Args:
        tokens: their number.
        temperature: divisor of the logits; 0 chooses the most likely token.
        top_k: number of the most likely tokens that are drawn from; None: all.
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
        self.settings = Settings(tokens, temperature, top_k, seed, end)
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


class GenerationCheck:
    """Comparisons of tokens that run alone with whole sequences.

    They are made of the first, second, fourth, eighth … and last token after a prompt: what a layer leaves
    for the token after the next one may be wrong though the next one's is right. Each is made once in a
    pipeline's life, and again after a prompt that is shorter or longer than all before, and in a longer
    sequence.
    """

    def __init__(self) -> None:
        self._prompt, self._prompts = 0, tuple[int, ...]()
        self._fresh = True
        self._token, self._length = 0, 0
        """Most tokens after a prompt, and longest sequence, of which the last token was compared."""

    def begin(self, prompt: int) -> None:
        """Begin a sequence with the length of its prompt."""
        self._prompt, known = prompt, self._prompts
        self._fresh = not known or not min(known) <= prompt <= max(known)

    def due(self, token: int, tokens: int) -> bool:
        """True if the ``token``-th of ``tokens`` that run alone after a prompt is to be compared."""
        if not token or not (token == tokens or is_doubling(token)):
            return False
        return self._fresh or token > self._token or self._prompt + token > self._length

    def compare(self, token: int, alone: Tensor, together: Tensor) -> None:
        """Compare the logits of a token that ran alone with those of the whole sequence.

        Raises:
            ConfigError: they differ.
        """
        difference = distance(together, alone, skip_non_finite=False)
        if difference > ACTIVATIONS.of(alone.dtype):
            raise ConfigError(
                f"generate: the logits of token {token} after the prompt differ by {difference:.2g} of the "
                "largest from those of the whole sequence in one piece; a layer looks at earlier positions, "
                "or counts them, without a cf.Carry, from which it takes what earlier tokens left, or leaves "
                "too little in it: let it hold one, or call predict on whole sequences"
            )
        self._token, self._length = max(self._token, token), max(self._length, self._prompt + token)
        prompts = *self._prompts, self._prompt
        self._prompts = min(prompts), max(prompts)


def generated(
    prompt: Tensor | None,
    sampling: Sampling,
    run: Callable[[Tensor, CallKind], Batch],
    check: GenerationCheck,
    *,
    stages: Mapping[int, LocalStage],
    workers: Workers,
) -> Tensor:
    """The prompt and the tokens that follow it, [samples, positions + tokens]; all workers call it.

    A replica whose samples have all ended goes on until those of all replicas have, as each run is one of
    all workers.

    Args:
        prompt: as of ``Pipeline.generate``.
        sampling: how tokens are chosen.
        run: predicts with some tokens, in a call of a kind.
        check: says which tokens are compared with the whole sequence.
        stages: the worker's stages.
        workers: ranks of the pipeline, and this worker among them.

    Raises:
        ConfigError: there is no prompt, workers have other settings, the output has no logits, or layers
            make something else of a token after others than of all in one piece.
    """
    tokens = prompts = _broadcast_prompt(stages, workers, prompt, sampling)
    samples, length = len(prompts), prompts.shape[1] + sampling.tokens
    if not samples:  # others have some, and each run is one of all
        tokens = prompts.new_zeros(1, prompts.shape[1])
    check.begin(prompts.shape[1])
    with ExitStack() as stack:
        caches = [stack.enter_context(stage.generating()) for stage in stages.values()]
        following = tokens
        ended = torch.full((len(tokens), 1), fill_value=not samples)
        while tokens.shape[1] < length and not _all_ended(workers, sampling, ended):
            logits = _logits(workers, run(following, CallKind.GENERATE))
            alone = tokens.shape[1] - prompts.shape[1]
            if check.due(alone, sampling.tokens - 1):
                for cache in caches:
                    cache.paused = True
                sequence = run(tokens, CallKind.GENERATE_WHOLE)
                check.compare(alone, logits, _logits(workers, sequence))
                for cache in caches:
                    cache.paused = False
            following = sampling.choose(logits)
            if sampling.end is not None:
                following = torch.where(ended, sampling.end, following)
                ended = ended | (following == sampling.end)
            tokens = torch.cat([tokens, following], 1)
    return torch.cat([tokens, tokens[:, -1:].expand(-1, length - tokens.shape[1])], 1)[:samples]


def _all_ended(workers: Workers, sampling: Sampling, ended: Tensor) -> bool:
    if sampling.end is None:
        return False
    here = bool(ended.all())
    return here if len(workers.ranks) == 1 else all(workers.transport.gather_objects(here))


def _broadcast_prompt(
    stages: Mapping[int, LocalStage], workers: Workers, prompt: Tensor | None, sampling: Sampling
) -> Tensor:
    local_prompt = prompt.cpu() if isinstance(prompt, Tensor) and 0 in stages else None
    rows = cast(
        "Sequence[tuple[Settings, Tensor | None]]",
        workers.transport.gather_objects((sampling.settings, local_prompt)),
    )
    for ranks in workers.ranks:
        for rank in ranks:
            _refuse_other(rows[ranks[0]][0], ranks[0], rows[rank][0], rank)
        _refuse_between_replicas(rows[0][0], rows[ranks[0]][0], ranks[0])
    prompts = [
        next((rows[rank][1] for rank in ranks if rows[rank][1] is not None), None) for ranks in workers.ranks
    ]
    for replica, tensor in enumerate(prompts):
        legal = (
            tensor is not None and tensor.dim() == 2 and tensor.dtype is torch.int64 and tensor.shape[1] > 0
        )
        if not legal or not any(len(samples) for samples in prompts if samples is not None):
            shown = "nothing" if tensor is None else f"{tensor.dtype} of shape {(*tensor.shape,)}"
            where = f" in replica {replica}" if len(prompts) > 1 else ""
            raise ConfigError(
                f"generate needs a prompt [samples, positions] of int64, and was given {shown}{where}"
            )
    return cast("Tensor", prompts[workers.replica])


def _refuse_other(settings: Settings, rank: int, expected: Settings, other_rank: int) -> None:
    if expected != settings:
        raise ConfigError(
            f"generate: rank {rank} has {settings}, and rank {other_rank} of its replica {expected}; give "
            "all workers of a replica the same"
        )


def _refuse_between_replicas(first: Settings, settings: Settings, rank: int) -> None:
    if (settings.tokens, settings.end is None) != (first.tokens, first.end is None):
        raise ConfigError(
            f"generate: rank 0 has {first}, and rank {rank} {settings}; replicas run together, so give all "
            "the same tokens, and all an end or none"
        )


def _logits(workers: Workers, batch: Batch) -> Tensor:
    """Logits at the last position, [samples, vocabulary], in the samples' order, on every worker's CPU."""
    outputs = cast("dict[Unit, Any]", batch.outputs)
    local_logits = {unit: _last_of(output).cpu() for unit, output in outputs.items()}
    rows = cast("list[dict[Unit, Tensor]]", workers.transport.gather_objects(local_logits))
    by_unit: dict[Unit, Tensor] = {}
    for rank in workers.ranks[workers.replica]:
        by_unit |= rows[rank]
    return torch.cat([by_unit[unit] for unit in sorted(by_unit)])


def _last_of(output: Any) -> Tensor:
    logits = output
    if not isinstance(logits, Tensor):
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not (isinstance(logits, Tensor) and logits.dim() == 3 and logits.is_floating_point()):
        shown = type(output).__name__
        if isinstance(output, Tensor):
            shown = f"{output.dtype} of shape {(*output.shape,)}"
        raise ConfigError(
            f"generate needs logits [samples, positions, vocabulary], and the last layer gives {shown}"
        )
    return logits[:, -1]
