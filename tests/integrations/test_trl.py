"""Trainers of TRL in stages: with one worker those of TRL, with more those with one. Skipped without TRL."""

from __future__ import annotations

import gc
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import counterflow as cf
from counterflow.integrations.transformers import PipelineFields, PipelineTrainerMixin

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "optim": "sgd",
    "learning_rate": 0.1, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
    "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {"SFT": {}, "DPO": {"precompute_ref_log_probs": True}, "Reward": {}}
NOT_NUMBERS = ("runtime", "per_second", "total_flos", "accuracies")


def words(samples: int) -> list[str]:
    draw = torch.Generator().manual_seed(samples)
    lengths = torch.randint(4, 9, (samples,), generator=draw).tolist()
    return [" ".join(f"w{n}" for n in torch.randint(3, 60, (k,), generator=draw).tolist()) for k in lengths]


def tokenizer() -> Any:
    import tokenizers

    known = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 64)}
    words_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<s>"))
    words_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def trainer_of(kind: str, folder: str, pp: int | None, **more: Any) -> Any:
    import datasets
    import trl

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip
    name = "LlamaForSequenceClassification" if kind == "Reward" else "LlamaForCausalLM"
    trainer, arguments = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    options = OPTIONS | MORE[kind] | more | {"output_dir": folder}
    if pp is not None:
        trainer = type("Staged", (PipelineTrainerMixin, trainer), {})
        arguments = make_dataclass("Arguments", (), bases=(PipelineFields, arguments))
        arguments.__module__ = __name__
        setattr(sys.modules[__name__], "Arguments", arguments)  # noqa: B010 - checkpoints contain it
        options |= {"pp": pp}
    texts = {"text": words(8)}
    if kind != "SFT":
        pairs = [f" {text}" for text in words(9)]
        texts = {"prompt": words(8), "chosen": pairs[:8], "rejected": pairs[1:]}
    data = datasets.Dataset.from_dict(texts)
    return trainer(
        model=getattr(transformers, name)(config).double(), args=arguments(**options), train_dataset=data,
        eval_dataset=data.select(range(3)), processing_class=tokenizer(),
    )  # fmt: skip


def run(kind: str, folder: str, pp: int | None) -> list[dict[str, float]]:
    trainer = trainer_of(kind, folder, pp)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return [
        {name: v for name, v in row.items() if not any(part in name for part in NOT_NUMBERS)}
        for row in trainer.state.log_history
    ]


def in_stages(folder: str, pp: int) -> list[list[dict[str, float]]]:
    gc.freeze()  # the trainers collect garbage, also among all that is imported
    return [run(kind, f"{folder}/{kind}", pp) for kind in MORE]


def test_losses_metrics_and_weights_are_those_of_trl(tmp_path: Path) -> None:
    two = cf.launch(in_stages, str(tmp_path / "2"), 2, workers=2, transport="gloo")[0]
    one_stage = cf.launch(in_stages, str(tmp_path / "1"), 1, workers=1, transport="local", threads=1)[0]
    for kind, of_one, staged in zip(MORE, one_stage, two, strict=True):
        alone = run(kind, str(tmp_path / "alone" / kind), None)
        for row, wanted, of_two in zip(of_one, alone, staged, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4, abs=1e-4)  # TRL's fused head computes in float32
            assert of_two == pytest.approx(row, rel=1e-6, abs=1e-9)
        for source, tolerance in (("1", 1e-12), ("alone", 1e-5)):
            expected = weights(tmp_path / source / kind)
            actual_weights = weights(tmp_path / "2" / kind)
            assert actual_weights.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(actual_weights[name], tensor, rtol=0, atol=tolerance, msg=name)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in (folder / "final").glob("*.safetensors") for n, t in load_file(file).items()}


def test_a_reference_that_is_not_precomputed_is_refused(tmp_path: Path) -> None:
    """With adapters TRL switches these off for the reference; without, it loads a second model."""
    import peft
    import trl

    class Staged(PipelineTrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
        pass

    trainer = trainer_of("DPO", str(tmp_path / "first"), 1, eval_strategy="no")
    trainer.args.precompute_ref_log_probs = False
    model = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for refused_model in (model, trainer.model):
        with pytest.raises(cf.ConfigError, match="precompute_ref_log_probs=False cannot be combined"):
            Staged(
                model=refused_model,
                args=trainer.args,
                train_dataset=trainer.train_dataset,
                processing_class=tokenizer(),
            )
