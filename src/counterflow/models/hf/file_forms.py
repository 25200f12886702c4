"""Forms of weights in the files of a folder: transformers joins some when it reads them, and renames some.

A model of transformers has one tensor for all experts of a layer, [experts, ...], and most of its files have
several for each expert. The rules are transformers' own, of the installed version.

Invariant: of a tensor of experts any range of experts is read, or written, without the others.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BY_EXPERT = "MergeModulelist", "SplitModulelist"
"""Operations of transformers that join one tensor of each expert, and the reverse."""

_SUPPORTED = {*_BY_EXPERT, "Concatenate", "Chunk", "Transpose"}
"""Operations of transformers that need nothing but the tensors."""

Load = Callable[[str, slice], Tensor]
"""Function of a name in the files and of rows that returns these rows of the tensor."""

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of a model in the files of a folder.

    Attributes:
        name: name in the model.
        sources: names in the files by the converter's pattern; those of experts in their order.
        converter: transformers' converter that joins them; None: one tensor, as in the model.
    """

    name: str
    sources: Mapping[str, tuple[str, ...]]
    converter: Any = None

    @property
    def by_expert(self) -> bool:
        """True if the files have tensors of each expert by itself."""
        return self.converter is not None and _kind(self.converter.operations[0]) in _BY_EXPERT

    def read(self, load: Load, rows: slice = ALL) -> Tensor:
        """Rows of the tensor; of a tensor of experts, only these experts are read."""
        if self.converter is None:
            ((name,),) = self.sources.values()
            return load(name, rows)
        converter = copy.deepcopy(self.converter)
        chosen = rows if self.by_expert else ALL
        for pattern, names in self.sources.items():
            for name in names[chosen]:
                converter.add_tensor(self.name, name, pattern, load(name, ALL))
        ((_, tensor),) = converter.convert(self.name).items()
        joined: Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return joined if self.by_expert else joined[rows]


def stored_weights(model: PreTrainedModel, names: Iterable[str]) -> dict[str, StoredWeight]:
    """Weights in the files by names in a model, without those that need more of the model than tensors.

    Args:
        model: a transformers model, which defines the names.
        names: names in the files.
    """
    conversion = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    rules = conversion.get_model_conversion_mapping(model)
    renamed = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    stored: dict[str, StoredWeight] = {}
    joined: dict[str, dict[str, list[str]]] = {}
    of_model = model.base_model_prefix, model.state_dict()
    for name in sorted(names, key=loading.dot_natural_key):
        known, pattern = loading.rename_source_key(name, renamed, converters, *of_model)
        if known not in of_model[1] and name in of_model[1]:  # as transformers does, which has it as it is
            known, pattern = loading.rename_source_key(name, [], [], *of_model)
        if pattern is None:
            stored[known] = StoredWeight(known, {known: (name,)})
        elif _is_supported(by_pattern[pattern]):
            joined.setdefault(known, {}).setdefault(pattern, []).append(name)
    for known, sources in joined.items():
        order = {pattern: tuple(of_pattern) for pattern, of_pattern in sources.items()}
        stored[known] = StoredWeight(known, order, by_pattern[next(iter(order))])
    return stored


class FileForms:
    """Forms in which transformers writes the weights of a model.

    Args:
        model: a transformers model, which defines the names.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        conversion = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        self._loading = loading
        rules = getattr(model, "_weight_conversions", None)
        if rules is None:  # as transformers' save_pretrained does
            rules = [
                rule
                for rule in conversion.get_model_conversion_mapping(model, add_legacy=False)
                if not isinstance(rule, loading.PrefixChange)
            ]
        reverse = [rule.reverse_transform() for rule in rules[::-1]]
        self._renamed = [rule for rule in reverse if isinstance(rule, loading.WeightRenaming)]
        self._converters = [rule for rule in reverse if isinstance(rule, loading.WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def by_expert(self, name: str) -> bool:
        """True if the files have tensors of each expert for a weight of the model."""
        converter = self._converter(name)
        return converter is not None and _kind(converter.operations[-1]) in _BY_EXPERT

    def pieces(self, name: str, tensor: Tensor, first: int = 0) -> dict[str, Tensor]:
        """A weight of the model as the files have it, by names in the files.

        Args:
            name: name in the model.
            tensor: the weight, or the rows of some experts; on the meta device, only shapes are computed.
            first: number of the first of these experts.
        """
        converter = self._converter(name)
        if converter is None:
            return {self._loading.apply_renamings(name, self._renamed): tensor}
        known, pattern = self._loading.apply_converters(name, self._converters)
        converter = copy.deepcopy(converter)
        converter.add_tensor(known, name, pattern, tensor)
        pieces = converter.convert(known)
        numbered = {_renumbered(key, converter.target_patterns, first): t for key, t in pieces.items()}
        return {
            self._loading.apply_renamings(key, self._renamed): t[0] if isinstance(t, list) else t
            for key, t in numbered.items()
        }

    def _converter(self, name: str) -> Any:
        _, pattern = self._loading.apply_converters(name, self._converters)
        converter = self._by_pattern.get(pattern)
        return converter if converter is not None and _is_supported(converter) else None


def _kind(operation: object) -> str:
    return type(operation).__name__


def _is_supported(converter: Any) -> bool:
    operations = converter.operations
    plain = all(not getattr(op, "check_dims", False) for op in operations)
    return (
        plain
        and {*map(_kind, operations)} <= _SUPPORTED
        and (len(converter.target_patterns) == 1 or len(converter.source_patterns) == 1)
    )


def _renumbered(name: str, patterns: Iterable[str], first: int) -> str:
    """Name of a tensor of an expert, whose number in the name counts from the first of a range.

    >>> _renumbered("layers.2.mlp.experts.1.up_proj.weight", ["experts.*.up_proj.weight"], 4)
    'layers.2.mlp.experts.5.up_proj.weight'
    """
    for pattern in patterns if first else ():
        before, star, after = pattern.partition("*")
        match = re.search(f"{re.escape(before)}(\\d+){re.escape(after)}", name) if star else None
        if match:
            return f"{name[: match.start(1)]}{int(match[1]) + first}{name[match.end(1) :]}"
    return name
