"""Names of weights in torchtitan's models by those in transformers' models, both ways.

The tables follow torchtitan's adapters (``state_dict_adapter.py`` of ``deepseek_v3``, ``qwen3`` and
``gpt_oss``, August 2026), and its modules where these have other names. There the weights of a layer's
experts are tensors [experts, ...] too, but what transformers has as ``gate_up_proj`` are two of them; those
of gpt-oss have their last dimensions exchanged.

Invariant: every weight has a counterpart, or the conversion is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TitanForm:
    """A weight of a model in torchtitan.

    Attributes:
        names: names of the tensors of which the weight consists, along dimension 1.
        transposed: True if dimensions 1 and 2 are exchanged.
    """

    names: tuple[str, ...]
    transposed: bool = False

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of torchtitan for a tensor in the weight's shape."""
        turned = tensor.transpose(1, 2) if self.transposed else tensor
        return list(turned.chunk(len(self.names), 1)) if len(self.names) > 1 else [turned]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """A tensor in the weight's shape for those of torchtitan."""
        joined = torch.cat(list(tensors), 1) if len(tensors) > 1 else tensors[0]
        return joined.transpose(1, 2) if self.transposed else joined

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes of torchtitan's tensors for the weight's shape."""
        return [tuple(part.shape) for part in self.split(torch.empty(shape, device="meta"))]


_ROUTED = "moe.routed_experts.inner_experts."
_BIAS = "moe.expert_bias_E"
"""Buffer of a bias for the choice of experts, which all of torchtitan's models of experts have."""

_LAYER = re.compile(r"^((?:model\.)?layers\.)(\d+)\.(.+)$")

_OUTER = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_NORMS = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_DENSE = {
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": TitanForm((f"{_ROUTED}w1_EFD", f"{_ROUTED}w3_EFD")),
    "mlp.experts.down_proj": TitanForm((f"{_ROUTED}w2_EDF",)),
    "mlp.gate.weight": TitanForm(("moe.router.gate.weight",)),
}
_QWEN3 = {
    **_NORMS,
    **_DENSE,
    **{f"self_attn.{n}_proj.weight": f"attention.qkv_linear.w{n}.weight" for n in "qkv"},
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
}
_DEEPSEEK = {
    **_NORMS,
    **_DENSE,
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate.e_score_correction_bias": _BIAS,
    **{
        f"mlp.shared_experts.{name}_proj.weight": f"moe.shared_experts.{titan}.weight"
        for name, titan in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_GPT_OSS = {
    **_NORMS,
    **{
        f"self_attn.{n}_proj.{kind}": f"attention.qkv_linear.w{n}.{kind}"
        for n in "qkv"
        for kind in ("weight", "bias")
    },
    **{f"self_attn.o_proj.{kind}": f"attention.wo.{kind}" for kind in ("weight", "bias")},
    "self_attn.sinks": "attention.sinks",
    **{f"mlp.router.{kind}": f"moe.router.gate.{kind}" for kind in ("weight", "bias")},
    "mlp.experts.gate_up_proj_bias": f"{_ROUTED}mlp1_bias_EG",
    "mlp.experts.down_proj_bias": f"{_ROUTED}mlp2_bias_ED",
}


def _forms(names: Mapping[str, str]) -> dict[str, TitanForm]:
    return {name: TitanForm((titan,)) for name, titan in names.items()}


TABLES: dict[str, dict[str, TitanForm]] = {
    "deepseek_v3": {**_forms(_DEEPSEEK), **_EXPERTS},
    "qwen3": _forms(_QWEN3),
    "qwen3_moe": {**_forms(_QWEN3), **_EXPERTS},
    "gpt_oss": {
        **_forms(_GPT_OSS),
        "mlp.experts.gate_up_proj": TitanForm((f"{_ROUTED}mlp1_weight_EGD",), transposed=True),
        "mlp.experts.down_proj": TitanForm((f"{_ROUTED}mlp2_weight_EDF",), transposed=True),
    },
}
"""Forms of the weights of a layer by their names in it, by transformers' type of the model."""

_SUFFIXES = {
    "w1": "w1_EFD",
    "w2": "w2_EDF",
    "w3": "w3_EFD",
    "mlp1_weight": "mlp1_weight_EGD",
    "mlp2_weight": "mlp2_weight_EDF",
    "mlp1_bias": "mlp1_bias_EG",
    "mlp2_bias": "mlp2_bias_ED",
}
"""Names of torchtitan's weights of experts by their names before 2026."""


class TitanNames:
    """Names in torchtitan of the weights of a model of transformers.

    Args:
        kind: transformers' type of the model.
        place: what has this type, for errors.

    Raises:
        ConfigError: torchtitan has no such model, or its names are not in the tables.
    """

    def __init__(self, kind: str, place: str) -> None:
        if kind not in TABLES:
            raise ConfigError(
                f"{place}: is a model of type {kind!r}, of which no names in torchtitan are known; those of "
                f"{', '.join(TABLES)} are"
            )
        self.kind = kind
        self._table = TABLES[kind]
        self._known = {_BIAS} | {name for form in self._table.values() for name in form.names}

    def form(self, name: str) -> TitanForm:
        """Form in torchtitan of a weight of the model.

        Raises:
            ConfigError: torchtitan has none.
        """
        match = _LAYER.match(name)
        form = self._table.get(match[3]) if match else None
        if match and form is not None:
            return TitanForm(tuple(f"layers.{match[2]}.{n}" for n in form.names), form.transposed)
        if name not in _OUTER:
            raise ConfigError(f"{name}: torchtitan has no such weight in a model of type {self.kind!r}")
        return TitanForm((_OUTER[name],))

    def biases(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes of torchtitan's biases for the choice of experts that the model lacks; they are 0."""
        name = "mlp.experts.down_proj"
        if name not in self._table or any(_BIAS in form.names for form in self._table.values()):
            return {}
        layers = {match[2]: shapes[n][0] for n in shapes if (match := _LAYER.match(n)) and match[3] == name}
        return {f"layers.{number}.{_BIAS}": (experts,) for number, experts in layers.items()}

    def forms_in(self, titan: Iterable[str], place: str) -> tuple[dict[str, TitanForm], list[str]]:
        """Forms of the model's weights for the names in a folder of torchtitan, in older spellings too.

        Returns:
            By the model's name, the form with the names in the folder; and names of biases that the model
            lacks.

        Raises:
            ConfigError: the folder has a weight that the model has not, or a part of one is missing.
        """
        spelled = {self._current(name): name for name in titan}
        biases = {current: name for current, name in spelled.items() if self._lacks(current)}
        forms: dict[str, TitanForm] = {}
        for current in sorted(spelled.keys() - biases.keys()):
            name = self._model_name(current)
            if name is None:
                raise ConfigError(f"{place}: no model of type {self.kind!r} has {spelled[current]}")
            form = self.form(name)
            missing = next((n for n in form.names if n not in spelled), None)
            if missing is not None:
                raise ConfigError(f"{place}: has {spelled[current]} but no {missing}; give the whole model")
            forms[name] = TitanForm(tuple(spelled[n] for n in form.names), form.transposed)
        return dict(sorted(forms.items())), [*biases.values()]

    def _lacks(self, current: str) -> bool:
        return current.endswith(f".{_BIAS}") and self._model_name(current) is None

    def _model_name(self, current: str) -> str | None:
        match = _LAYER.match(current)
        table = self._table.items()
        inner = next((name for name, form in table if match and match[3] in form.names), None)
        if match and inner is not None:
            return f"model.layers.{match[2]}.{inner}"
        return next((name for name, titan in _OUTER.items() if titan == current), None)

    def _current(self, name: str) -> str:
        match = _LAYER.match(name)
        if not match:
            return "lm_head.weight" if name == "output.weight" else name
        inner = match[3]
        experts = re.fullmatch(r"moe\.(?:routed_experts\.inner_experts|experts)\.(\w+)", inner)
        if experts:
            inner = _ROUTED + _SUFFIXES.get(experts[1], experts[1])
        elif inner == "moe.expert_bias":
            inner = _BIAS
        elif inner not in self._known:
            inner = re.sub(r"^attention\.(w[qkv]\.)", r"attention.qkv_linear.\1", inner)
        return f"layers.{match[2]}.{inner}"
