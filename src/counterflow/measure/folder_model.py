"""A transformers folder as the subject of a measurement: its config, any weights, and random tokens.

Invariant: nothing but ``config.json`` is read, so no weights, tokenizer or data have to be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from counterflow.errors import ConfigError

from .subject_pipeline import Subject
from .user_model import UserModel

_SAMPLES = 8
_POSITIONS = 256
"""Maximum tokens of a sample."""


def next_token_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the logits for the tokens that follow."""
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder of transformers with a causal language model.

    Attributes:
        path: the folder, with ``config.json``.
    """

    path: Path

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.path)

    def __call__(self) -> Subject:
        """The subject of a measurement."""
        return self.load()()

    def load(self) -> UserModel:
        """Make the model on the meta device, and a mini-batch of random tokens.

        Raises:
            ConfigError: transformers is missing, or makes no causal language model of the folder.
        """
        try:
            import transformers  # noqa: PLC0415 - it takes seconds
        except ImportError:
            raise ConfigError(
                f"{self.path}: a transformers folder needs transformers: pip install transformers"
            ) from None
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{self.path}: no causal language model of transformers ({reason}); for another one write a "
                "function, FILE.py:make_model, that returns model, loss, (inputs, targets)"
            ) from error
        config.use_cache = False
        positions = min(_POSITIONS, getattr(config, "max_position_embeddings", _POSITIONS))
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.get_text_config().vocab_size, (_SAMPLES, positions), generator=draw)
        return UserModel(model.train(), next_token_loss, (tokens, tokens))
