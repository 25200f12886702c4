"""Small models of transformers with random weights, and mini-batches for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY, POSITIONS = 61, 12

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_GROUPED = SIZES | {"num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = SIZES | _NO_DROPOUT
_RECURRENT: dict[str, Any] = {
    name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")
} | {"state_size": 4}
_WINDOW = {"sliding_window": 4}


def _gpt2(**options: Any) -> tf.GPT2Config:
    return tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options},
    )


def _distilbert() -> tf.DistilBertConfig:
    return tf.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=3,
        n_heads=4,
        hidden_dim=48,
        dropout=0.0,
        attention_dropout=0.0,
    )


def _modernbert() -> tf.ModernBertConfig:
    return tf.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, local_attention=8)


CAUSAL: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(_gpt2()),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)),
    "llama-tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED, tie_word_embeddings=True)),
    "llama-eager": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED, attn_implementation="eager")),
    "qwen2": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**_GROUPED, **_WINDOW, use_sliding_window=True, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, **_WINDOW)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_GROUPED, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GROUPED, **_WINDOW, head_dim=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GROUPED, **_WINDOW, head_dim=8)),
    "granite": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(**_GROUPED, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5)
    ),
    "granite-swa": lambda: tf.GraniteSWAForCausalLM(tf.GraniteSWAConfig(**_GROUPED, **_WINDOW)),
    "deepseek-v4": lambda: tf.DeepseekV4ForCausalLM(
        tf.DeepseekV4Config(
            **{name: value for name, value in _GROUPED.items() if name != "intermediate_size"},
            **_WINDOW,
            head_dim=8,
            moe_intermediate_size=48,
            q_lora_rank=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "olmo-hybrid": lambda: tf.OlmoHybridForCausalLM(
        tf.OlmoHybridConfig(
            **_GROUPED,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=48,
            word_embed_proj_dim=16,
            dropout=0.0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ),
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(**_RECURRENT, time_step_rank=2)),
    "mamba2": lambda: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(**_RECURRENT, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)
    ),
    "falcon-mamba": lambda: tf.FalconMambaForCausalLM(tf.FalconMambaConfig(**_RECURRENT, time_step_rank=2)),
}
MASKED: dict[str, Callable[[], Any]] = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_BERT)),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**_BERT)),
    "electra": lambda: tf.ElectraForMaskedLM(tf.ElectraConfig(**_BERT, embedding_size=16)),
    "distilbert": lambda: tf.DistilBertForMaskedLM(_distilbert()),
    "modernbert": lambda: tf.ModernBertForMaskedLM(_modernbert()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "bert-classes": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_BERT, num_labels=3)),
    "llama-classes": lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**_GROUPED, num_labels=3)),
    "bert-tokens": lambda: tf.BertForTokenClassification(tf.BertConfig(**_BERT, num_labels=3)),
}
MODELS = CAUSAL | MASKED | OTHERS


def tokenizer(texts: list[str], vocabulary: int = 300, *, masks: bool = False) -> Any:
    """A tokenizer of bytes and what is frequent in some texts; with a mask token as BERT's."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = bytes_, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<s>", "</s>", *(["<mask>"] if masks else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    if masks:
        trained.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        special = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=trained, **special)


def llama(vocabulary: int = 300) -> Any:
    """A Llama that takes the tokenizer's tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(tf.LlamaConfig(**{**_GROUPED, "vocab_size": vocabulary})).train()


def bert(kind: str, vocabulary: int = 300, **options: Any) -> Any:
    """A BERT or RoBERTa of some kind that takes the tokenizer's tokens."""
    config = tf.BertConfig if kind.startswith("Bert") else tf.RobertaConfig
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(tf, kind)(config(**{**_BERT, "vocab_size": vocabulary, **options})).train()


def made(name: str) -> Any:
    """A model of that name, in training mode, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().train()


def with_dropout() -> Any:
    """A GPT-2 that draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tf.GPT2LMHeadModel(_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)).train()


def batch(
    name: str, samples: int = 8, *, seed: int = 0, padded: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and labels; the first samples have no padding, so that a micro-batch may have none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (samples, POSITIONS), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(3, samples):
            mask[row, POSITIONS - row :] = 0
        ids = ids * mask
    inputs = {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}
    if name.endswith("-classes"):
        return inputs, torch.randint(3, (samples,), generator=generator)
    labels = torch.where(mask == 1, ids, -100)
    if name.endswith("-tokens"):
        labels = torch.where(mask == 1, ids % 3, -100)
    elif name in MASKED:
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, labels, -100)
    return inputs, labels
