"""Runs of transformers models: the model, adapters, tokenizer and samples of a config, and the exported
folder.

Invariant: transformers is imported only when such a model is asked for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from counterflow.common.extras import imported
from counterflow.data.targets import Labelled, Masked, numbered
from counterflow.data.text import entropy_of
from counterflow.data.text_batches import TextBatches
from counterflow.data.tokens import Documents, PackedDocuments, Padded, read_documents
from counterflow.errors import ConfigError
from counterflow.models import hf
from counterflow.models.hf.weight_files import MAKING, local_folder, read_config

from .config import RunConfig
from .sections.model_section import LoraSection
from .source import ModelAndData


@dataclass(frozen=True, slots=True)
class _Task:
    auto: str  # class of transformers that makes such a model
    known: str  # class names in transformers by model type
    adapters: str | None  # task type of peft; None: none
    target: str  # what such a model predicts


_CAUSAL = _Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "CAUSAL_LM", "token")
_MASKED = _Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", None, "token")
_CLASSES = _Task(
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "SEQ_CLS",
    "label",
)


def from_transformers(config: RunConfig) -> ModelAndData:
    """The model of a config, on the meta device, and samples for it.

    Raises:
        ConfigError: the model, its tokenizer or the data cannot be read, or do not fit.
    """
    section, data = config.model, config.data
    assert section.path is not None  # a config of this kind has a tokenizer and data
    assert data.path is not None
    task = _task_of(section.path)
    if config.mesh.cp > 1 and task is not _CAUSAL:
        raise ConfigError(
            f"mesh.cp = {config.mesh.cp}: contexts share causal attention alone, and model.path = "
            f"{section.path} is no causal language model; leave it out"
        )
    dtype = getattr(torch, section.dtype or "float32")
    auto = getattr(imported("transformers"), task.auto)
    model: Any = hf.load(section.path, auto=auto, dtype=dtype, weights=not section.fresh)
    tokenizer = _tokenizer(section.path, section.vocabulary)
    if task is _CLASSES and model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # the token that marks the end of a text
    base = model
    if config.lora.rank is not None:
        model = _with_adapters(model, config.lora, task)
    hf.layers(model)  # refuse a model that cannot be cut before anything is read
    label = (data.label or "label") if task is _CLASSES else None
    if data.label is not None and label is None:
        raise ConfigError(
            f"data.label: is for classifiers of texts, but model.path = {section.path} is a "
            f"{type(base).__name__}; leave it out"
        )
    documents = read_documents(data.path, tokenizer, data.field or "text", label)
    batches, entropy = _samples(config, task, base.config, tokenizer, documents)
    return ModelAndData(
        *(model, hf.layers, hf.loss, batches, str(data.path), documents.bytes, entropy, documents.digest),
        target=task.target,
        unit="token",
        export=(
            "model" if config.lora.rank is None else "adapter",
            partial(hf.save, model, tokenizer=tokenizer),
        ),
    )


def _samples(
    config: RunConfig, task: _Task, of_model: Any, tokenizer: Any, documents: Documents
) -> tuple[TextBatches, float]:
    """The model's samples, and the loss of a model that knows only how frequent its
    targets are.
    """
    section, data, seed = config.model, config.data, config.train.seed
    size = section.positions, section.vocabulary
    options: dict[str, Any] = {"seed": seed, "name": str(data.path)}
    known = of_model.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id
    padding = next((token for token in known if token is not None and token >= 0), 0)
    if task is _CLASSES:
        if data.samples == "packed":
            raise ConfigError(
                'data.samples = "packed": a classifier predicts the class of one text at a time; leave it out'
            )
        if of_model.num_labels == 1 or of_model.problem_type not in (None, "single_label_classification"):
            raise ConfigError(
                f"model.path = {section.path}: predicts values or several labels, but `counterflow train` "
                "has "
                "only classifiers with one label per text; train this model with cf.Pipeline"
            )
        if of_model.pad_token_id is None:
            raise ConfigError(
                f"model.path = {section.path}: its tokenizer has no padding token, which a classifier "
                "needs to find the ends of texts; set tokenizer.pad_token = tokenizer.eos_token, say, and "
                "save it"
            )
        try:
            names = {name: number for number, name in of_model.id2label.items()}
            labels = numbered(documents, names, of_model.num_labels)
        except ConfigError as error:
            raise ConfigError(f"{data.path}: {error}") from None
        return Labelled(documents, *size, labels, padding=padding, **options), entropy_of(labels)
    causal = task is _CAUSAL
    samples = (
        Padded(documents, *size, causal=causal, padding=padding, **options)
        if data.samples == "padded"
        else PackedDocuments(documents, *size, causal=causal, **options)
    )
    if causal:
        return samples, documents.entropy
    try:
        return Masked(samples, tokenizer, seed=seed), documents.entropy
    except ConfigError as error:
        raise ConfigError(f"model.path = {section.path}: {error}") from None


def _task_of(path: str) -> _Task:
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    named = read_config(path).architectures or []
    for task in (_CAUSAL, _MASKED, _CLASSES):
        if not named or set(named) & set(getattr(modeling_auto, task.known).values()):
            return task
    raise ConfigError(
        f"model.path = {path}: is a {named[0]}, but `counterflow train` trains causal and masked language "
        "models and classifiers of texts; give one of these, or train the model with cf.Pipeline, "
        "cf.models.hf.layers and cf.models.hf.loss"
    )


def _with_adapters(model: Any, section: LoraSection, task: _Task) -> Any:
    peft = imported("peft")
    rank = section.rank
    assert rank is not None
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=section.alpha if section.alpha is not None else 2 * rank,
        lora_dropout=section.dropout or 0.0,
        target_modules=list(section.targets) if section.targets is not None else None,
        task_type=task.adapters,
    )
    with MAKING, torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the message of one package about the other
        try:
            return peft.get_peft_model(model, config).train()
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"lora.targets: no adapters can be made: {reason}") from None


def _tokenizer(path: str, vocabulary: int) -> Any:
    transformers = imported("transformers")
    folder = local_folder(path, weights=False)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path = {path}: its tokenizer cannot be read: {reason}; save one there with "
            "save_pretrained"
        ) from None
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model.path = {path}: its tokenizer has {len(tokenizer)} tokens, but the model has "
            f"{vocabulary}; give the tokenizer of this model, or resize_token_embeddings before"
        )
    return tokenizer
