"""Real models whose layers cf.layers finds by itself, without a line of glue: those of other packages.

Each model is built as its package documents it, captured with one mini-batch, and compared with the list of
its layers by cf.same_model, in training mode and, with another number of samples, in evaluation mode:
outputs, loss and all gradients, in float64. Some sizes are smaller than usual, no structure is changed.

Packages: pip install timm torchvision diffusers segmentation-models-pytorch monai transformers x-transformers
vit-pytorch efficientnet_pytorch torchaudio; models of missing ones are left out, and counted as such.
"""

from __future__ import annotations

import importlib
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kit import arguments, keep, machine_line
from torch import Tensor, nn

import counterflow as cf

Made = tuple[nn.Module, Callable[[int], Any]]


def images(size: int = 64, channels: int = 3, dims: int = 2) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, *(size,) * dims, generator=torch.Generator().manual_seed(n))


def ids(length: int = 12, vocabulary: int = 60) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(3, vocabulary, (n, length), generator=torch.Generator().manual_seed(n))


def named(**parts: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    return lambda n: {name: part(n) for name, part in parts.items()}


def numbers(most: int) -> Callable[[int], Tensor]:
    return lambda n: torch.arange(n) % most


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))


def torchvision() -> Iterator[tuple[str, Callable[[], Made]]]:
    models = importlib.import_module("torchvision.models")

    for name, size in {
        "resnet18": 64, "resnext50_32x4d": 64, "wide_resnet50_2": 64, "mobilenet_v2": 64,
        "mobilenet_v3_small": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64, "convnext_tiny": 64,
        "densenet121": 64, "regnet_y_400mf": 64, "shufflenet_v2_x1_0": 64, "squeezenet1_1": 64,
        "mnasnet1_0": 64, "vgg11_bn": 64, "alexnet": 96, "googlenet": 96, "inception_v3": 299,
        "vit_b_32": 224,
        "swin_t": 64, "swin_v2_t": 64, "maxvit_t": 224,
    }.items():  # fmt: skip
        yield name, lambda name=name, size=size: (models.get_model(name, weights=None), images(size))
    for name in ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"):
        yield (
            name,
            lambda name=name: (
                models.get_model(name, weights=None, weights_backbone=None, num_classes=5),
                images(64),
            ),
        )
    yield "r3d_18", lambda: (models.get_model("r3d_18", weights=None), images(16, 3, 3))


def timm() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("timm")

    for name, size in {
        "resnet26d": 64, "vit_tiny_patch16_224": 224, "deit_tiny_patch16_224": 224, "mixer_s32_224": 224,
        "convnextv2_atto": 64, "efficientformerv2_s0": 224, "poolformer_s12": 64,
        "beit_base_patch16_224": 224,
        "dm_nfnet_f0": 64, "mobilevitv2_050": 64, "xcit_nano_12_p16_224": 224, "gmlp_s16_224": 224,
        "tf_efficientnetv2_b0": 64, "seresnet18": 64, "hrnet_w18_small": 64,
        "swin_tiny_patch4_window7_224": 224,
    }.items():  # fmt: skip
        yield name, lambda name=name, size=size: (package.create_model(name, pretrained=False), images(size))


def diffusers() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("diffusers")

    small: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    yield (
        "UNet2DModel",
        lambda: (
            package.UNet2DModel(
                sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"), **small,
            ),
            named(sample=images(16), timestep=numbers(1000)),
        ),
    )  # fmt: skip
    yield (
        "UNet2DConditionModel",
        lambda: (
            package.UNet2DConditionModel(
                sample_size=16, cross_attention_dim=32, attention_head_dim=8,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **small,
            ),
            named(sample=images(16, 4), timestep=numbers(1000), encoder_hidden_states=floats(7, 32)),
        ),
    )  # fmt: skip
    yield (
        "DiTTransformer2DModel",
        lambda: (
            package.DiTTransformer2DModel(
                num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8,
                num_embeds_ada_norm=10, norm_num_groups=4,
            ),
            named(hidden_states=images(8, 4), timestep=numbers(1000), class_labels=numbers(10)),
        ),
    )  # fmt: skip
    yield (
        "AutoencoderKL",
        lambda: (
            package.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                **small,
            ),
            images(32),
        ),
    )


def segmentation_models_pytorch() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("segmentation_models_pytorch")

    for name in ("Unet", "UnetPlusPlus", "FPN", "DeepLabV3Plus", "MAnet", "Linknet", "PSPNet", "Segformer"):
        yield (
            name,
            lambda name=name: (
                getattr(package, name)("resnet18", encoder_weights=None, classes=3),
                images(64),
            ),
        )


def monai() -> Iterator[tuple[str, Callable[[], Made]]]:
    nets = importlib.import_module("monai.networks.nets")

    wide: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    yield (
        "UNet",
        lambda: (nets.UNet(**wide, channels=(4, 8, 16), strides=(2, 2), num_res_units=1), images(16, 1, 3)),
    )
    yield "SegResNet", lambda: (nets.SegResNet(**wide, init_filters=8), images(16, 1, 3))
    yield (
        "AttentionUnet",
        lambda: (nets.AttentionUnet(**wide, channels=(4, 8, 16), strides=(2, 2)), images(16, 1, 3)),
    )
    yield "DenseNet121", lambda: (nets.DenseNet121(**wide), images(32, 1, 3))
    yield (
        "UNETR",
        lambda: (
            nets.UNETR(1, 2, (32, 32, 32), hidden_size=24, mlp_dim=48, num_heads=3, feature_size=4),
            images(32, 1, 3),
        ),
    )
    yield (
        "DynUNet",
        lambda: (
            nets.DynUNet(**wide, kernel_size=(3,) * 3, strides=(1, 2, 2), upsample_kernel_size=(2, 2)),
            images(16, 1, 3),
        ),
    )


def transformers() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("transformers")

    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = small | {"vocab_size": 64, "num_hidden_layers": 3}
    pair: dict[str, Any] = {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    grouped: dict[str, Any] = {"num_key_value_heads": 2}
    both = named(input_ids=ids(), decoder_input_ids=ids(9))
    for name, options in {
        "Llama": {}, "Phi": {}, "GPTNeoX": {}, "Mistral": grouped, "Qwen3": grouped | {"head_dim": 8},
        "Gemma": grouped | {"head_dim": 8}, "Mixtral": grouped | {"num_local_experts": 4},
    }.items():  # fmt: skip
        yield (
            f"{name}ForCausalLM",
            lambda name=name, options=options: (
                getattr(package, f"{name}ForCausalLM")(getattr(package, f"{name}Config")(**text, **options)),
                named(input_ids=ids()),
            ),
        )
    yield (
        "BertForSequenceClassification",
        lambda: (
            package.BertForSequenceClassification(package.BertConfig(**text)),
            named(input_ids=ids()),
        ),
    )
    yield (
        "T5ForConditionalGeneration",
        lambda: (
            package.T5ForConditionalGeneration(
                package.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
            ),
            both,
        ),
    )
    yield (
        "BartForConditionalGeneration",
        lambda: (package.BartForConditionalGeneration(package.BartConfig(**pair)), both),
    )
    yield (
        "WhisperForConditionalGeneration",
        lambda: (
            package.WhisperForConditionalGeneration(
                package.WhisperConfig(**pair, num_mel_bins=8, max_source_positions=16)
            ),
            named(input_features=floats(8, 32), decoder_input_ids=ids(9)),
        ),
    )
    yield (
        "ViTForImageClassification",
        lambda: (
            package.ViTForImageClassification(
                package.ViTConfig(**small, num_hidden_layers=3, image_size=32, patch_size=8)
            ),
            named(pixel_values=images(32)),
        ),
    )
    yield (
        "SegformerForSemanticSegmentation",
        lambda: (
            package.SegformerForSemanticSegmentation(
                package.SegformerConfig(
                    hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, sr_ratios=[4, 2],
                    patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                    decoder_hidden_size=32,
                )
            ),
            named(pixel_values=images(64)),
        ),
    )  # fmt: skip
    yield (
        "MambaForCausalLM",
        lambda: (
            package.MambaForCausalLM(
                package.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=4)
            ),
            named(input_ids=ids()),
        ),
    )


def x_transformers() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("x_transformers")

    yield (
        "TransformerWrapper",
        lambda: (
            package.TransformerWrapper(
                num_tokens=64, max_seq_len=32, attn_layers=package.Decoder(dim=32, depth=3, heads=4)
            ),
            ids(),
        ),
    )


def vit_pytorch() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("vit_pytorch")

    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "heads": 4}
    yield "ViT", lambda: (package.ViT(**sizes, depth=3, mlp_dim=48), images(32))
    yield "SimpleViT", lambda: (package.SimpleViT(**sizes, depth=3, mlp_dim=48), images(32))


def efficientnet_pytorch() -> Iterator[tuple[str, Callable[[], Made]]]:
    package = importlib.import_module("efficientnet_pytorch")
    yield "EfficientNet-B0", lambda: (package.EfficientNet.from_name("efficientnet-b0"), images(64))


PACKAGES = (
    torchvision, timm, diffusers, segmentation_models_pytorch, monai, transformers, x_transformers,
    vit_pytorch, efficientnet_pytorch,
)  # fmt: skip


def tried(make: Callable[[], Made]) -> tuple[str, str, str]:
    """Layers, seconds of the capture, and what came of it."""
    torch.manual_seed(0)
    model, batch = make()
    began = time.perf_counter()
    try:
        layers = cf.layers(model, batch(2))
    except cf.ConfigError as error:
        text = re.sub(r"/\S*site-packages/", "", " ".join(str(error).split()))
        return "", "", f"refused: {text[:200]}"
    seconds = f"{time.perf_counter() - began:.1f}"
    worst = 0.0
    for training in (True, False):
        model.train(training)
        samples = 2 if training else 3
        given = batch(samples)
        found = (
            cf.same_model(model, layers, kwargs=given, check=False)
            if isinstance(given, dict)
            else cf.same_model(model, layers, given, check=False)
        )
        if not found.ok:
            mode = "training" if training else "evaluation"
            text = " ".join(str(found).split())[:200]
            return str(len(layers)), seconds, f"DIFFERS ({mode}, {samples} samples): {text}"
        worst = max(worst, found.output_error, found.gradient_error)
    return str(len(layers)), seconds, f"the same ({worst:.0e})"


def main() -> None:
    parser = arguments(__doc__, "captured.txt")
    parser.add_argument("--only", nargs="+", default=[], help="models whose name has one of these words")
    parser.add_argument("--packages", nargs="+", default=[each.__name__ for each in PACKAGES])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [f"# python benchmarks/captured.py, {machine_line()}", "", "| package | model | layers | s | |"]
    lines.append("|---|---|--:|--:|---|")
    print(*lines, sep="\n", flush=True)
    counts: Counter[str] = Counter()
    for package in PACKAGES:
        name = package.__name__
        if name not in args.packages:
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            lines.append(f"| {name} | | | | not there: {str(error)[:80]} |")
            print(lines[-1], flush=True)
            continue
        for model, make in package():
            if args.only and not any(word in model for word in args.only):
                continue
            try:
                layers, seconds, said = tried(make)
            except Exception as error:  # a package may raise anything
                layers, seconds, said = (
                    "",
                    "",
                    f"fails: {type(error).__name__}: {' '.join(str(error).split())[:150]}",
                )
            counts[said.split(" (")[0].split(":")[0]] += 1
            lines.append(f"| {name} | {model} | {layers} | {seconds} | {said} |")
            print(lines[-1], flush=True)
    lines += ["", f"{sum(counts.values())} models, without a line of glue: {dict(counts)}"]
    print(*lines[-2:], sep="\n")
    if args.keep:
        keep("captured", lines)


if __name__ == "__main__":
    main()
