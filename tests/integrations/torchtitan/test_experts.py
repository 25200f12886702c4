"""Models of experts by the names of torchtitan."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

import counterflow as cf
from counterflow.errors import ConfigError
from counterflow.integrations.conversion import convert
from counterflow.integrations.torchtitan.model_names import TABLES, TitanNames

from ...kit import FileFunction

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CASES = runpy.run_path(str(Path(__file__).parents[2] / "models" / "hf" / "expert_cases.py"))
KINDS = {"deepseek_v3": "DeepseekV3", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}

LAYER_1 = {
    "deepseek_v3": """attention.kv_norm.weight attention.wkv_a.weight attention.wkv_b.weight
        attention.wo.weight attention.wq.weight attention_norm.weight ffn_norm.weight moe.expert_bias_E
        moe.routed_experts.inner_experts.w1_EFD moe.routed_experts.inner_experts.w2_EDF
        moe.routed_experts.inner_experts.w3_EFD moe.router.gate.weight moe.shared_experts.w1.weight
        moe.shared_experts.w2.weight moe.shared_experts.w3.weight""",
    "qwen3_moe": """attention.k_norm.weight attention.q_norm.weight attention.qkv_linear.wk.weight
        attention.qkv_linear.wq.weight attention.qkv_linear.wv.weight attention.wo.weight
        attention_norm.weight ffn_norm.weight moe.expert_bias_E moe.routed_experts.inner_experts.w1_EFD
        moe.routed_experts.inner_experts.w2_EDF moe.routed_experts.inner_experts.w3_EFD
        moe.router.gate.weight""",
    "gpt_oss": """attention.qkv_linear.wk.bias attention.qkv_linear.wk.weight attention.qkv_linear.wq.bias
        attention.qkv_linear.wq.weight attention.qkv_linear.wv.bias attention.qkv_linear.wv.weight
        attention.sinks attention.wo.bias attention.wo.weight attention_norm.weight ffn_norm.weight
        moe.expert_bias_E moe.routed_experts.inner_experts.mlp1_bias_EG
        moe.routed_experts.inner_experts.mlp1_weight_EGD moe.routed_experts.inner_experts.mlp2_bias_ED
        moe.routed_experts.inner_experts.mlp2_weight_EDF moe.router.gate.bias moe.router.gate.weight""",
}
"""Names of a layer in torchtitan's ``state_dict``."""

OLDER = {
    "lm_head.weight": "output.weight",
    "moe.routed_experts.inner_experts.w1_EFD": "moe.experts.w1",
    "moe.routed_experts.inner_experts.w2_EDF": "moe.experts.w2_EDF",
    "moe.expert_bias_E": "moe.expert_bias",
    "attention.qkv_linear.": "attention.",
}
"""Spellings of torchtitan before."""


def titan_state(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of a model by transformers' and by torchtitan's names."""
    state, names = CASES["model_of"](KINDS[kind]).state_dict(), TitanNames(kind, "")
    titan = {
        part: tensor.contiguous()
        for name, weight in state.items()
        for form in [names.form(name)]
        for part, tensor in zip(form.names, form.split(weight), strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return state, titan | {name: torch.zeros(shape) for name, shape in names.biases(shapes).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_torchtitan(kind: str, tmp_path: Path) -> None:
    """And its folders are read by them, and by those that it had before."""
    base = tmp_path / "base"
    CASES["model_of"](KINDS[kind]).config.save_pretrained(base)
    state, titan = titan_state(kind)
    layer = {name.removeprefix("layers.1.") for name in titan if name.startswith("layers.1.")}
    assert layer == set(LAYER_1[kind].split())
    assert {name for name in titan if not name.startswith("layers.")} == {
        *("tok_embeddings.weight", "norm.weight", "lm_head.weight"),
    }
    older = dict(titan)
    for now, before in OLDER.items():
        older = {name.replace(now, before): tensor for name, tensor in older.items()}
    assert len(older.keys() - titan.keys()) > 3
    for number, tensors in enumerate((titan, older)):
        save(tensors, checkpoint_id=tmp_path / f"titan-{number}", no_dist=True)
        convert(tmp_path / f"titan-{number}", tmp_path / f"model-{number}", base)
        torch.testing.assert_close(cf.load_weights(tmp_path / f"model-{number}"), state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_what_torchtitans_compute(kind: str) -> None:
    """The formulas of its ``GroupedExperts`` with its weights, and transformers' module with its own."""
    model, (_, titan) = CASES["model_of"](KINDS[kind]), titan_state(kind)
    prefix = "layers.1.moe.routed_experts.inner_experts."
    weight = {name.removeprefix(prefix): w for name, w in titan.items() if name.startswith(prefix)}
    x, choices = torch.randn(6, 16, dtype=torch.float64), torch.arange(6)[:, None] % 4
    expected = model.model.layers[1].mlp.experts(x, choices, torch.ones(6, 1, dtype=torch.float64))
    for row, expert in enumerate(choices.flatten().tolist()):
        if kind == "gpt_oss":
            gate_up = weight["mlp1_weight_EGD"][expert] @ x[row] + weight["mlp1_bias_EG"][expert]
            gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            output = weight["mlp2_weight_EDF"][expert] @ hidden + weight["mlp2_bias_ED"][expert]
        else:
            hidden = functional.silu(weight["w1_EFD"][expert] @ x[row]) * (weight["w3_EFD"][expert] @ x[row])
            output = weight["w2_EDF"][expert] @ hidden
        torch.testing.assert_close(output, expected[row], rtol=1e-12, atol=1e-12)


def test_what_has_no_counterpart_is_refused(tmp_path: Path) -> None:
    for kind, name in (*KINDS.items(), ("mixtral", "Mixtral")):
        CASES["model_of"](name).config.save_pretrained(tmp_path / kind)
    state, titan = titan_state("qwen3_moe")
    bias = "layers.0.moe.expert_bias_E"
    half = {name: tensor for name, tensor in titan.items() if not name.endswith("w3_EFD")}
    routed = "layers.0.moe.routed_experts.inner_experts."
    options = {f"param_groups.{routed}w1_EFD.lr": 0.1, f"param_groups.{routed}w3_EFD.lr": 0.2}
    slots = {f"state.{routed}w{number}_EFD.step": torch.tensor(number) for number in (1, 3)}
    unlike = {f"state.{routed}w1_EFD.exp_avg": titan[f"{routed}w1_EFD"]}
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("options", titan | {"optimizer": options}, "qwen3_moe", "w1_EFD and .*w3_EFD differ, and the model"),
        ("steps", titan | {"optimizer": slots}, "qwen3_moe", "w1_EFD.step and .*w3_EFD.step differ"),
        (
            "slots",
            titan | {"optimizer": unlike},
            "qwen3_moe",
            "keeps exp_avg of a part of model.layers.0.mlp",
        ),
        ("biased", titan | {bias: torch.ones(4)}, "qwen3_moe", f"{bias} changes the choice of experts"),
        ("half", half, "qwen3_moe", "no layers.0.moe.routed_experts.inner_experts.w3_EFD"),
        ("other", titan, "gpt_oss", "no model of type 'gpt_oss' has layers"),
        ("mixtral", titan, "mixtral", "is a model of type 'mixtral', of which no names in torchtitan"),
    ]
    for name, tensors, kind, message in cases:
        save(tensors, checkpoint_id=tmp_path / f"titan-{name}", no_dist=True)
        with pytest.raises(ConfigError, match=message):
            convert(tmp_path / f"titan-{name}", tmp_path / "new", tmp_path / kind)
    save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    convert(tmp_path / "plain", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="whose experts have other names in torchtitan; give its folder"):
        convert(tmp_path / "checkpoint", tmp_path / "new", torchtitan=True)
    with pytest.raises(ConfigError, match="torchtitan has no such weight in a model of type 'gpt_oss'"):
        convert(tmp_path / "checkpoint", tmp_path / "new", tmp_path / "gpt_oss", torchtitan=True)
    assert not (tmp_path / "new").exists()
    assert "qwen3" in TABLES


@pytest.mark.parametrize("case", ["own_layers", "families"])
def test_trainings_go_on_with_divided_experts(case: str) -> None:
    function = FileFunction(Path(__file__).with_name("expert_cases.py"), case)
    cf.launch(function, workers=4, timeout_seconds=120, threads=1)
