"""A run of a model of transformers: model, adapters, tokenizer and samples of a config, and the folder at the
end.

Invariant: nothing here imports transformers before it is asked for such a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from counterflow.data.batches import Batches
from counterflow.data.tokens import Packed, Padded, read_documents
from counterflow.errors import ConfigError
from counterflow.extras import imported
from counterflow.models import hf
from counterflow.models.hf.weights import MAKING, local_folder, read_config
from counterflow.runtime.stages.layers import Model

from .config import LoraSection, RunConfig


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What a run trains, and on what.

    Attributes:
        model: on the meta device.
        list_layers: its layers; None: it is a list of them.
        loss: its output and targets to its loss.
        batches: mini-batches.
        text: what to call their text.
        text_bytes: length of that.
        entropy: in nats a token: the loss of a model that knows only how frequent each is.
        tokenizer: of transformers; None: tokens are bytes.
    """

    model: Model
    list_layers: Callable[[nn.Module], Sequence[nn.Module]] | None
    loss: Callable[[Any, Any], Any]
    batches: Batches
    text: str
    text_bytes: int
    entropy: float
    tokenizer: Any = None


def from_transformers(config: RunConfig) -> Made:
    """The model of a config, on the meta device, and samples for it.

    Raises:
        ConfigError: the model, its tokenizer or the data cannot be read, or do not fit.
    """
    section, data = config.model, config.data
    assert section.path is not None  # a config of this kind has both
    assert data.path is not None
    _refuse_other_tasks(section.path)
    dtype = getattr(torch, section.dtype or "float32")
    transformers = imported("transformers")
    model: Any = hf.load(
        section.path, auto=transformers.AutoModelForCausalLM, dtype=dtype, weights=not section.fresh
    )
    if config.lora.rank is not None:
        model = _with_adapters(model, config.lora)
    hf.layers(model)  # what cannot be cut is refused before anything is read
    tokenizer = _tokenizer(section.path, section.vocabulary)
    documents = read_documents(data.path, tokenizer, data.field or "text")
    options: dict[str, Any] = {"seed": config.train.seed, "name": str(data.path)}
    batches: Batches
    if data.samples == "padded":
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        batches = Padded(documents, section.positions, section.vocabulary, padding=padding or 0, **options)
    else:
        batches = Packed(documents, section.positions, section.vocabulary, **options)
    return Made(
        *(model, hf.layers, hf.loss, batches, str(data.path), documents.bytes, documents.entropy),
        tokenizer=tokenizer,
    )


def _refuse_other_tasks(path: str) -> None:
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal,  # noqa: N811
    )

    named = read_config(path).architectures or []
    if named and not set(named) & set(causal.values()):
        raise ConfigError(
            f"model.path = {path}: is a {named[0]}, and `counterflow train` trains causal language models; "
            "give one of these, or train it with cf.Pipeline, cf.models.hf.layers and cf.models.hf.loss"
        )


def _with_adapters(model: Any, section: LoraSection) -> Any:
    peft = imported("peft")
    rank = section.rank
    assert rank is not None
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=section.alpha if section.alpha is not None else 2 * rank,
        lora_dropout=section.dropout or 0.0,
        target_modules=list(section.targets) if section.targets is not None else None,
        task_type="CAUSAL_LM",
    )
    with MAKING, torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one package about the other
        try:
            return peft.get_peft_model(model, config).train()
        except ValueError as error:
            told = str(error).strip().splitlines()[0]
            raise ConfigError(f"lora.targets: no adapters can be made: {told}") from None


def _tokenizer(path: str, vocabulary: int) -> Any:
    transformers = imported("transformers")
    folder = local_folder(path, weights=False)
    try:
        found = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path = {path}: its tokenizer cannot be read: {told}; save one there with save_pretrained"
        ) from None
    if len(found) > vocabulary:
        raise ConfigError(
            f"model.path = {path}: its tokenizer has {len(found)} tokens, and the model {vocabulary}; give "
            "the tokenizer of this model, or resize_token_embeddings before"
        )
    return found
