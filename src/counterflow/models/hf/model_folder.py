"""A model of transformers as a folder that ``from_pretrained`` reads, written by the workers of a pipeline.

Invariant: each worker writes what it holds, and no worker has the whole model: of a sharded tensor that the
files have in one, a worker has all for as long as it is written. The pipeline's tensors are written without
rounding, in the form in which transformers writes them, and a tied tensor is written once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterflow.common.extras import imported
from counterflow.common.tensors.dtensors import full_tensor, has_blocks, is_dtensor, local
from counterflow.common.tensors.torch_private import local_shape_and_offset
from counterflow.errors import ConfigError

from .file_forms import FileForms
from .folder_files import INDEX, SINGLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTERS = "lora_", "modules_to_save"
"""Parts of names of tensors that belong to adapters."""


def save(
    model: nn.Module, pipeline: Any, folder: Path | str, *, tokenizer: Any = None, ema: bool = False
) -> None:
    """Write a trained pipeline as a folder of transformers, or of peft; all workers call it.

    For a model with adapters only these are written, for ``PeftModel.from_pretrained``.

    Args:
        model: model of the pipeline, with ``list_layers=layers``.
        pipeline: pipeline with nothing in flight (``flush``).
        folder: folder on storage that all workers share.
        tokenizer: tokenizer to save with it.
        ema: whether to write averages of the trained weights (``Pipeline.ema``).

    Raises:
        ConfigError: the folder cannot be written, or mini-batches are in flight.
    """
    folder = Path(folder)
    transport = pipeline.transport
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(model, "peft_config"):
            tensors: dict[str, Tensor] = pipeline.model_state_dict(local=True, ema=ema)
            _save_adapters(model, _kept_for_adapters(tensors), transport, folder)
        else:
            with pipeline.local_weights(ema=ema) as weights:
                _save_shards(model, weights, transport, folder)
        if transport.rank == 0 and tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None
    transport.gather([])  # everything is written


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of this worker, and what the files have of it.

    Attributes:
        name: name in the model.
        value: the weight, a DTensor if this worker has a part.
        first: number of this worker's first expert, if the files have each by itself; else None.
        sizes: bytes by names in the files; of experts, only those of this worker.
    """

    name: str
    value: Tensor
    first: int | None
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, name: str, value: Tensor, forms: FileForms) -> _Weight:
        """Pieces of a weight of this name in the files."""
        first, shape = None, tuple(value.shape)
        if forms.by_expert(name) and is_dtensor(value) and has_blocks(value):
            shape, (first, *_) = local_shape_and_offset(value)
        empty = torch.empty(shape, dtype=value.dtype, device="meta")
        pieces = forms.pieces(name, empty, first or 0) if empty.numel() or first is None else {}
        return cls(name, value, first, {key: piece.nbytes for key, piece in pieces.items()})

    def pieces(self, forms: FileForms) -> dict[str, Tensor]:
        """Tensors of the files; all workers that hold a part of a weight make the call."""
        if self.first is None:
            return forms.pieces(self.name, full_tensor(self.value.detach()))
        return forms.pieces(self.name, local(self.value), self.first) if self.sizes else {}


def _save_shards(model: Any, weights: Mapping[Sequence[str], Tensor], transport: Any, folder: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    forms, written = FileForms(model), _written(model)
    parts = [
        _Weight.of(name, value, forms)
        for names, value in weights.items()
        for name in names
        if name in written
    ]
    sizes = {name: size for part in parts for name, size in part.sizes.items()}
    sizes_by_rank = transport.gather_objects(sizes)
    owners = _shared_out(sizes_by_rank)
    writers = sorted(set(owners.values()))
    files = {
        rank: SINGLE if len(writers) == 1 else f"model-{number:05}-of-{len(writers):05}.safetensors"
        for number, rank in enumerate(writers, 1)
    }
    if transport.rank == 0:  # files of an earlier model would be read instead of this one
        for old in (*folder.glob("model*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
    transport.gather([])
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, piece in part.pieces(forms).items():
            if owners[name] == transport.rank:
                tensors[name] = piece.detach().cpu().contiguous()
    if transport.rank in files:
        save_file(tensors, folder / files[transport.rank], metadata={"format": "pt"})
    if transport.rank:
        return
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    _save_config(model, folder, dtypes.pop() if len(dtypes) == 1 else None)
    if len(writers) > 1:
        total = sum(sizes_by_rank[rank][name] for name, rank in owners.items())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: files[rank] for name, rank in sorted(owners.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shared_out(sizes_by_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The writer of each tensor among its holders: the one with the least to write so far.

    >>> _shared_out([{"a": 3, "b": 2}, {"a": 3, "b": 2, "c": 1}])
    {'a': 0, 'b': 1, 'c': 1}
    """
    load = [0] * len(sizes_by_rank)
    owners: dict[str, int] = {}
    for row in sizes_by_rank:
        for name, size in row.items():
            if name not in owners:
                owners[name] = min(
                    (r for r, sizes in enumerate(sizes_by_rank) if name in sizes), key=load.__getitem__
                )
                load[owners[name]] += size
    return owners


def _save_config(model: PreTrainedModel, folder: Path, dtype: Any) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _written(model: PreTrainedModel) -> set[str]:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    same: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(id(tensor), []).append(name)
    return {next((n for n in names if n not in tied), names[0]) for names in same.values()}


def _kept_for_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if any(part in name for part in _ADAPTERS)}


def _save_adapters(model: Any, tensors: Mapping[str, Tensor], transport: Any, folder: Path) -> None:
    peft = imported("peft")
    from safetensors.torch import save_file  # noqa: PLC0415

    rows = transport.gather_objects(dict(tensors))
    if transport.rank:
        return
    gathered = {name: tensor for row in rows for name, tensor in row.items()}
    model.create_or_update_model_card(str(folder))
    for adapter, config in model.peft_config.items():
        place = folder if adapter == "default" else folder / adapter
        place.mkdir(exist_ok=True)
        state = peft.get_peft_model_state_dict(
            model, state_dict=gathered, adapter_name=adapter, save_embedding_layers=False
        )
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in state.items()},
            place / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        adapter_config = copy.copy(config)
        adapter_config.inference_mode = True  # in the form that peft writes
        if adapter_config.base_model_name_or_path is None:
            adapter_config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None)
        adapter_config.save_pretrained(str(place))
