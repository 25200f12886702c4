"""What each of transformers' tests of its Trainer claims: the rows of ``trainer_claims``."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainer_claims_kit import (
    CloseInParts,
    Kit,
    Points,
    Stream,
    checkpoints,
    close,
    expected,
    history,
    line,
    llama,
    losses,
    padded,
    raises,
    same,
    texts,
    words,
    written,
)

from counterflow.runtime.workers.world import current_transport

Run = Callable[[Kit], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """A test of transformers.

    Attributes:
        file: its file, without ``test_trainer_``.
        name: its name.
        run: the claim; None: it does not run.
        refused: whether the claim is that the trainer in stages refuses it.
        ends: whether that ends the workers.
        why: why it does not apply.
    """

    file: str
    name: str
    run: Run | None = None
    refused: bool = False
    ends: bool = False
    why: str = ""


ROWS: list[Row] = []


def claims(file: str, *names: str) -> Callable[[Run], Run]:
    """Make a function the claim of tests."""

    def add(run: Run) -> Run:
        ROWS.extend(Row(file, name, run) for name in names)
        return run

    return add


def refuses(file: str, names: tuple[str, ...], model: Any = line, named: Any = dict, **options: Any) -> None:
    """Add tests of what the trainer in stages refuses when it is made."""

    def run(kit: Kit) -> None:
        kit.trainer(model(), named(), **options)

    ROWS.extend(Row(file, name, run, refused=True) for name in names)


def leaves(file: str, why: str, *names: str) -> None:
    """Add tests that do not apply."""
    ROWS.extend(Row(file, name, why=why) for name in names)


NO_TRAINER = "it makes no trainer"
WEIGHTS = "it downloads pretrained weights or data; the same claim runs on small models in other rows"
HUB = "it pushes to the Hub, which needs a network"
OTHER = "it is about another way to distribute a model, without stages"
INSTALLED = "it needs a package that is not a part of this machine"


# -- test_trainer.py


def _mixed(kit: Kit, **lower: bool) -> None:
    full, mixed = (kit.trainer(llama().float(), learning_rate=1e-3, **more) for more in ({}, lower))
    for trainer in (full, mixed):
        trainer.train()
    assert same(kit.weights(full), kit.weights(mixed), 0.1)


@claims("core", "test_mixed_fp16")
def _(kit: Kit) -> None:
    _mixed(kit, fp16=True)


@claims("core", "test_mixed_bf16")
def _(kit: Kit) -> None:
    _mixed(kit, bf16=True)


leaves("core", "it needs a GPU", "test_tf32")


@claims("core", "test_gradient_accumulation")
def _(kit: Kit) -> None:
    whole = kit.trainer(named={"data_collator": None}, per_device_train_batch_size=8)
    parts = kit.trainer(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    for trainer in (whole, parts):
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
    assert same(kit.weights(whole), kit.weights(parts), 1e-9)


def _aligned(kit: Kit, named: dict[str, Any], *, counts: bool) -> None:
    told = []
    for batch, accumulated in ((8, 1), (4, 2)):
        trainer = kit.trainer(
            llama(), named, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated,
            max_steps=4, optim="sgd",
        )  # fmt: skip
        if not counts:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
        told.append(losses(trainer))
    apart = max(abs(a - b) for a, b in zip(*told, strict=True))
    assert apart < 1e-6 if counts else apart > 1e-6


@claims("core", "test_gradient_accumulation_loss_alignment_with_model_loss")
def _(kit: Kit) -> None:
    _aligned(kit, {}, counts=True)
    _aligned(kit, {}, counts=False)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that is divided by the step's tokens."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


@claims("core", "test_gradient_accumulation_loss_alignment_with_loss_func")
def _(kit: Kit) -> None:
    _aligned(kit, {"compute_loss_func": summed}, counts=True)


@claims("core", "test_num_batches_in_training_with_gradient_accumulation")
def _(kit: Kit) -> None:
    for length in (30, 33):
        trainer = kit.trainer(named={"train_dataset": Points(length)}, gradient_accumulation_steps=3)
        found: list[int] = []
        own = trainer.get_batch_samples

        def noting(iterator: Any, count: int, device: Any, own: Any = own, found: Any = found) -> Any:
            batches = own(iterator, count, device)
            assert len(batches[0]) == count > 0
            found.append(count)
            return batches

        trainer.get_batch_samples = noting
        trainer.train()
        assert sum(found) == 2 * math.ceil(length / 4)


@claims("core", "test_gradient_checkpointing")
def _(kit: Kit) -> None:
    trainer = kit.trainer(llama(), activation_checkpointing=True)
    before = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    trainer.train()
    after = kit.weights(trainer)
    assert all(not torch.allclose(before[name], after[name]) for name in after)


refuses("core", ("test_neftune",), neftune_noise_alpha=0.4)


def _not_finite(kit: Kit) -> None:
    trainer = kit.trainer(llama(), learning_rate=1e300, optim="sgd", max_grad_norm=0.0, logging_steps=5)
    trainer.train()


ROWS.append(Row("core", "test_logging_inf_nan_filter", _not_finite, refused=True, ends=True))


@claims("core", "test_log_level")
def _(kit: Kit) -> None:
    for level, says in (("info", True), ("error", False)):
        said: list[str] = []
        with mock.patch(
            "transformers.trainer.logger.handle", lambda record: said.append(record.getMessage())
        ):
            trainer = kit.trainer(log_level=level, max_steps=1)
            trainer.train()
        if trainer.is_world_process_zero():  # others have log_level_replica
            assert any("Running training" in text for text in said) == says
    transformers.logging.set_verbosity_error()


@claims("core", "test_flos_extraction")
def _(kit: Kit) -> None:
    trainer = kit.trainer(llama())
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    trainer.train()
    assert isinstance(trainer.state.total_flos, float)
    assert trainer.state.total_flos > 0


@claims("core", "test_mem_metrics")
def _(kit: Kit) -> None:
    for skips in (False, True):
        trainer = kit.trainer(skip_memory_metrics=skips, max_steps=1)
        found = {"init", "train"} if not skips else set()
        metrics = trainer.train().metrics
        assert {n.split("_mem_")[0] for n in metrics if n.endswith("cpu_alloc_delta")} == found
        for stage, metrics in (
            ("eval", trainer.evaluate()),
            ("test", trainer.predict(Points(4)).metrics),
        ):
            assert (f"{stage}_mem_cpu_alloc_delta" in metrics) != skips


@claims("core", "test_include_num_input_tokens_seen")
def _(kit: Kit) -> None:
    rows = texts(4)
    longest, real = max(len(r["input_ids"]) for r in rows), sum(len(r["input_ids"]) for r in rows)
    for asked, wanted in (("non_padding", real), ("all", 4 * longest), (True, 4 * longest)):
        trainer = kit.trainer(
            llama(), {"train_dataset": rows}, include_num_input_tokens_seen=asked, max_steps=1
        )
        trainer.train()
        assert trainer.state.num_input_tokens_seen == wanted


@claims("core", "test_get_num_trainable_parameters")
def _(kit: Kit) -> None:
    trainer = kit.trainer()
    assert trainer.get_num_trainable_parameters() == 4 + 4 + 16 + 4 + 4 + 1
    trainer.model.one.requires_grad_(False)
    assert trainer.get_num_trainable_parameters() == 16 + 4 + 4 + 1


@claims("core", "test_training_loss")
def _(kit: Kit) -> None:
    even, uneven = kit.trainer(logging_steps=8), kit.trainer(logging_steps=5)
    ends = [trainer.train().training_loss for trainer in (even, uneven)]
    assert abs(sum(losses(even)) / len(losses(even)) - ends[0]) < 1e-4
    assert abs(ends[0] - ends[1]) < 1e-4


@claims("core", "test_number_of_steps_in_training")
def _(kit: Kit) -> None:
    for options, steps in (({}, 16), ({"num_train_epochs": 1.5}, 12), ({"max_steps": 3}, 3)):
        assert kit.trainer(**options).train().global_step == steps


@claims("core", "test_num_train_epochs_in_training")
def _(kit: Kit) -> None:
    few: dict[str, Any] = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 5}
    assert kit.trainer(max_steps=3, **few).train().global_step == 3
    assert kit.trainer(**few).train().global_step == 2


@claims("core", "test_reproducible_training")
def _(kit: Kit) -> None:
    found = []
    for seed in (42, 42, 314):
        trainer = kit.trainer(seed=seed)
        trainer.train()
        found.append(kit.weights(trainer))
    assert same(found[0], found[1], 0.0)
    assert not same(found[0], found[2])


@claims("core", "test_trainer_with_datasets")
def _(kit: Kit) -> None:
    import datasets

    points = Points()
    columns = {"x": points.x.tolist(), "labels": points.y.tolist()}
    found = []
    for extra, format_ in (({}, None), ({}, "torch"), ({"extra": points.x.tolist()}, None)):
        data = datasets.Dataset.from_dict(columns | extra)
        data.set_format(type=format_, **({"dtype": torch.float64} if format_ else {}))
        trainer = kit.trainer(line().float() if format_ is None else None, {"train_dataset": data})
        trainer.train()
        found.append(kit.weights(trainer))
    assert same(found[0], found[1], 1e-3)  # datasets give float32 unless they are asked
    assert same(found[0], found[2])


refuses("core", ("test_model_init",), model=nn.Identity, named=lambda: {"model_init": line})
refuses(
    "core",
    ("test_torch_compile_loss_func_compatibility", "test_torch_compile_train", "test_torch_compile_eval"),
    torch_compile=True,
)
leaves("core", INSTALLED, "test_bnb_compile")


@claims("core", "test_early_stopping_callback")
def _(kit: Kit) -> None:
    options = {
        "num_train_epochs": 6, "eval_strategy": "epoch", "save_strategy": "epoch", "learning_rate": 0.0,
        "metric_for_best_model": "accuracy",
    }  # fmt: skip
    for loads in (True, False):
        trainer = kit.trainer(named={"compute_metrics": close}, load_best_model_at_end=loads, **options)
        trainer.add_callback(transformers.EarlyStoppingCallback(1, 1e-4))
        assert trainer.train().global_step == 16
        assert trainer.state.best_model_checkpoint is not None


refuses(
    "core",
    (
        "test_use_liger_kernel_patching", "test_use_liger_kernel_custom_config_patching",
        "test_use_liger_kernel_trainer", "test_use_liger_kernel_custom_config_trainer",
    ),
    use_liger_kernel=True,
)  # fmt: skip
leaves("core", WEIGHTS, "test_end_to_end_example")


@claims("core", "test_special_token_alignment")
def _(kit: Kit) -> None:
    trainer = kit.trainer(llama(eos_token_id=9, bos_token_id=8), {"processing_class": words()}, max_steps=1)
    assert trainer.model.config.eos_token_id == 9
    trainer.train()
    assert (trainer.model.config.bos_token_id, trainer.model.config.eos_token_id) == (1, 2)


refuses("core", ("test_trainer_works_without_model_config",), model=lambda: nn.Linear(1, 1))


@claims("core", "test_training_arguments_are_left_untouched")
def _(kit: Kit) -> None:
    folder = kit.folder()
    trainer = kit.trainer(folder=folder)
    trainer.train()
    assert trainer.args.to_dict() == kit.arguments(folder).to_dict()


@claims("core", "test_double_train_wrap_once")
def _(kit: Kit) -> None:
    trainer = kit.trainer(max_steps=2)
    trainer.train()
    before = trainer.model_wrapped
    first = kit.weights(trainer)
    trainer.train()
    assert trainer.model_wrapped is before
    assert not same(first, kit.weights(trainer))


# -- test_trainer_data.py


@claims("data", "test_train_and_eval_dataloaders")
def _(kit: Kit) -> None:
    for drops in (False, True):
        trainer = kit.trainer(
            named={"train_dataset": Points(66), "eval_dataset": Points(74)}, per_device_train_batch_size=16,
            per_device_eval_batch_size=32, dataloader_drop_last=drops,
        )  # fmt: skip
        assert trainer.get_train_dataloader().total_batch_size == 16
        assert trainer.get_eval_dataloader().total_batch_size == 32
        assert (len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader())) == (
            (4, 2) if drops else (5, 3)
        )
    assert len(trainer.get_eval_dataloader(Points(128))) == 4


class Loaders:
    """Two loaders, one after the other, without a dataset."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Any:
        """Go through the batches."""
        for loader in self.loaders:
            yield from loader


@claims("data", "test_dataloader_without_dataset")
def _(kit: Kit) -> None:
    class Own(kit.kind):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            return Loaders(super().get_train_dataloader(), super().get_train_dataloader())

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return Loaders(*(super(Own, self).get_eval_dataloader(eval_dataset) for _ in range(2)))

    trainer = kit.trainer(kind=Own)
    assert trainer.train().global_step == 32
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def _loaders(kit: Kit, *, persistent: bool) -> None:
    trainer = kit.trainer(
        named={"eval_dataset": {"one": Points(4), "two": Points(6)}},
        dataloader_persistent_workers=persistent,
        dataloader_num_workers=int(persistent),
    )  # fmt: skip
    trainer.accelerator.prepare = lambda loader: loader
    for name in ("one", "two"):
        first, again = trainer.get_eval_dataloader(name), trainer.get_eval_dataloader(name)
        assert first.dataset is again.dataset is trainer.eval_dataset[name]
        assert (first is again) == persistent


@claims("data", "test_get_eval_dataloader_without_persistent_workers")
def _(kit: Kit) -> None:
    _loaders(kit, persistent=False)


@claims("data", "test_get_eval_dataloader_with_persistent_workers")
def _(kit: Kit) -> None:
    _loaders(kit, persistent=True)


@claims("data", "test_label_smoothing_multi_label_incompatibility")
def _(kit: Kit) -> None:
    model = line()
    model.config.problem_type = "multi_label_classification"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = kit.trainer(model, label_smoothing_factor=0.1)
    assert any("Label smoothing is not compatible" in str(one.message) for one in said)
    assert trainer.label_smoother is None


leaves(
    "data", NO_TRAINER, "test_label_smoothing", "test_group_by_length", "test_group_by_length_with_dict",
    "test_group_by_length_with_batch_encoding", "test_distributed_length_grouped",
    "test_distributed_sampler_with_loop", "test_iterable_dataset_shard",
    "test_iterable_dataset_shard_with_length",
    "test_shard_sampler", "test_executable_batch_size", "test_executable_batch_size_no_search",
    "test_executable_batch_size_with_error", "test_get_parameter_names", "test_get_parameter_names_rmsnorm",
    "test_pad_and_concatenate_with_1d", "test_remove_columns_collator", "test_eval_loop_container",
)  # fmt: skip


@claims("data", "test_dynamic_shapes")
def _(kit: Kit) -> None:
    for steps in (None, 1):
        trainer = kit.trainer(llama(), eval_accumulation_steps=steps, per_device_eval_batch_size=2)
        assert math.isfinite(trainer.evaluate()["eval_loss"])
        found = trainer.predict(texts(5))
        longest = max(len(row["input_ids"]) for row in texts(5))
        assert found.predictions.shape == (5, longest, 32)
        for row, seen, logits in zip(texts(5), found.label_ids, found.predictions, strict=True):
            length = len(row["labels"])
            assert seen[:length].tolist() == row["labels"]
            assert (seen[length:] == -100).all()
            assert not (logits[:length] == -100).any()


@claims("data", "test_training_iterable_dataset")
def _(kit: Kit) -> None:
    trainer = kit.trainer(named={"train_dataset": Stream()}, max_steps=4)
    assert trainer.train().global_step == 4
    assert isinstance(trainer.get_train_dataloader(), torch.utils.data.DataLoader)


@claims("data", "test_evaluation_iterable_dataset")
def _(kit: Kit) -> None:
    model = line()
    model.accepts_loss_kwargs = False
    trainer = kit.trainer(model, {"eval_dataset": Stream(18), "compute_metrics": close})
    for stream in (None, Stream(13)):
        points = (stream or trainer.eval_dataset).points
        output, loss = expected(line(), points)
        told = trainer.evaluate(stream)
        assert abs(told["eval_loss"] - loss) < 1e-6
        assert abs(told["eval_accuracy"] - float(((output - points.y).abs() < 0.5).double().mean())) < 1e-6


@claims("data", "test_predict_iterable_dataset")
def _(kit: Kit) -> None:
    trainer = kit.trainer()
    for length in (16, 13):
        found = trainer.predict(Stream(length)).predictions
        assert np.allclose(found, expected(line(), Points(length))[0])


# -- test_trainer_evaluation.py


def _evaluates(kit: Kit, metrics: Callable[[], Any], **options: Any) -> None:
    for length in (16, 18):
        for more in ({}, {"preprocess_logits_for_metrics": lambda logits, labels: logits + 1}):
            trainer = kit.trainer(
                named={"eval_dataset": Points(length), "compute_metrics": metrics(), **more}, **options
            )
            told = trainer.evaluate()
            output, loss = expected(line(), Points(length))
            near = ((output + len(more) - Points(length).y).abs() < 0.5).double().mean()
            assert abs(told["eval_loss"] - loss) < 1e-5
            assert abs(told["eval_accuracy"] - float(near)) < 1e-6


@claims("evaluation", "test_evaluate")
def _(kit: Kit) -> None:
    _evaluates(kit, lambda: close)


@claims("evaluation", "test_evaluate_with_batch_eval_metrics")
def _(kit: Kit) -> None:
    _evaluates(kit, CloseInParts, batch_eval_metrics=True)


def _predicts(kit: Kit, metrics: Callable[[], Any], **options: Any) -> None:
    for length in (16, 18):
        trainer = kit.trainer(named={"compute_metrics": metrics()}, **options)
        found = trainer.predict(Points(length))
        output, _ = expected(line(), Points(length))
        assert np.allclose(found.predictions, output)
        near = float(((output - Points(length).y).abs() < 0.5).double().mean())
        assert abs(found.metrics["test_accuracy"] - near) < 1e-6
    trainer = kit.trainer(line(outputs=2))
    found = trainer.predict(Points(16))
    assert len(found.predictions) == 2
    assert all(np.allclose(one, expected(line(), Points(16))[0]) for one in found.predictions)
    labels = ("labels", "labels_2")
    trainer = kit.trainer(line(outputs=2), {"train_dataset": Points(16, labels)}, label_names=list(labels))
    found = trainer.predict(Points(16, labels))
    assert all(np.array_equal(one, Points(16).y) for one in found.label_ids)


@claims("evaluation", "test_predict")
def _(kit: Kit) -> None:
    _predicts(kit, lambda: close)


@claims("evaluation", "test_predict_with_batch_eval_metrics")
def _(kit: Kit) -> None:
    _predicts(kit, CloseInParts, batch_eval_metrics=True)


leaves("evaluation", OTHER, "test_evaluate_before_training_with_fsdp2")


@claims("evaluation", "test_train_and_predict_loss_parity")
def _(kit: Kit) -> None:
    batch = padded(texts(4))
    items = int((batch["labels"][:, 1:] != -100).sum())
    trainer = kit.trainer(llama(), {"compute_loss_func": summed})
    told = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[0]
    trained = trainer.training_step(trainer.model, dict(batch), items)  # in stages this updates the weights
    assert abs(float(trained) - float(told)) < 1e-6


@claims("evaluation", "test_eval_use_gather_object")
def _(kit: Kit) -> None:
    trainer = kit.trainer(eval_use_gather_object=True, max_steps=1)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert len(trainer.predict(Points(6)).predictions) == 6


refuses("evaluation", ("test_fp16_full_eval",), fp16_full_eval=True)
refuses("evaluation", ("test_bf16_full_eval",), bf16_full_eval=True)
leaves("evaluation", WEIGHTS, "test_trainer_eval_mrpc", "test_trainer_eval_lm")


@claims("evaluation", "test_trainer_eval_multiple")
def _(kit: Kit) -> None:
    trainer = kit.trainer(llama(), {"eval_dataset": {"one": texts(3), "two": texts(4)}})
    told = trainer.evaluate()
    assert math.isfinite(told["eval_one_loss"])
    assert math.isfinite(told["eval_two_loss"])


# -- test_trainer_callback.py


class Events(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes all events."""

    def __init__(self) -> None:
        self.events: list[str] = []


for _event in (
    "init_end", "train_begin", "train_end", "epoch_begin", "epoch_end", "step_begin", "pre_optimizer_step",
    "optimizer_step", "substep_end", "step_end", "evaluate", "predict", "save", "log", "prediction_step",
    "push_begin",
):  # fmt: skip

    def _on_event(self: Any, *given: Any, _event: str = _event, **named: Any) -> None:
        self.events.append(_event)

    setattr(Events, f"on_{_event}", _on_event)


def names(trainer: Any) -> list[str]:
    """Names of the callbacks."""
    return [type(one).__name__ for one in trainer.callback_handler.callbacks]


@claims(
    "callback", "test_default_callbacks_are_present", "test_custom_callback_added_at_init",
    "test_printer_callback_when_tqdm_disabled",
)  # fmt: skip
def _(kit: Kit) -> None:
    plain = kit.trainer()
    assert names(plain) == ["DefaultFlowCallback", "PrinterCallback"]
    assert names(kit.trainer(disable_tqdm=False)) == ["DefaultFlowCallback", "ProgressCallback"]
    assert names(kit.trainer(named={"callbacks": [Events]})) == [
        "DefaultFlowCallback", "Events", "PrinterCallback"]  # fmt: skip


@claims(
    "callback", "test_add_callback_by_class", "test_add_callback_by_instance",
    "test_remove_callback_by_class",
    "test_remove_callback_by_instance", "test_pop_callback_returns_instance",
)  # fmt: skip
def _(kit: Kit) -> None:
    trainer, one = kit.trainer(), Events()
    trainer.add_callback(one)
    assert one in trainer.callback_handler.callbacks
    trainer.remove_callback(one)
    assert one not in trainer.callback_handler.callbacks
    trainer.add_callback(Events)
    assert isinstance(trainer.pop_callback(Events), Events)
    trainer.remove_callback(transformers.PrinterCallback)
    assert names(trainer) == ["DefaultFlowCallback"]


@claims("callback", "test_duplicate_callback_warning")
def _(kit: Kit) -> None:
    with mock.patch("transformers.trainer_callback.logger.warning") as warned:
        kit.trainer(named={"callbacks": [Events, Events]})
    assert "Events" in warned.call_args[0][0]


@claims("callback", "test_event_flow")
def _(kit: Kit) -> None:
    for options in (
        {}, {"logging_steps": 3, "save_strategy": "steps", "save_steps": 5},
        {"eval_strategy": "steps", "eval_steps": 5}, {"eval_strategy": "epoch", "logging_steps": 4},
    ):  # fmt: skip
        one = Events()
        trainer = kit.trainer(named={"callbacks": [one]}, gradient_accumulation_steps=2, **options)
        trainer.train()
        assert one.events == list(_flow(trainer))


def _flow(trainer: Any) -> Any:
    """Events of a run of two epochs of eight batches, each step of two."""
    args = trainer.args
    evaluation = ["prediction_step"] * len(trainer.get_eval_dataloader()) + ["log", "evaluate"]
    yield from ("init_end", "train_begin")
    for step in range(1, 9):
        if step in (1, 5):
            yield "epoch_begin"
        yield from ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end")
        if step % args.logging_steps == 0:
            yield "log"
        if args.eval_strategy == "steps" and (step % args.eval_steps == 0 or step == 8):
            yield from evaluation
        if args.save_strategy == "steps" and (step % args.save_steps == 0 or step == 8):
            yield "save"
        if step in (4, 8):
            yield "epoch_end"
            if args.eval_strategy == "epoch":
                yield from evaluation
    yield from ("log", "train_end")


@claims("callback", "test_on_push_begin_event")
def _(kit: Kit) -> None:
    one = Events()
    trainer = kit.trainer(named={"callbacks": [one]}, max_steps=1)
    trainer.train()
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert one.events.count("push_begin") == 1


@claims("callback", "test_no_duplicate_save_on_epoch_strategy")
def _(kit: Kit) -> None:
    one = Events()
    trainer = kit.trainer(named={"callbacks": [one]}, max_steps=2, save_strategy="epoch")
    trainer.train()
    assert one.events.count("save") == 1


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends training after its first step, and notes the flags."""

    def __init__(self) -> None:
        self.flags: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        self.flags.append(control.should_log)
        control.should_training_stop = state.global_step >= 2
        return control


@claims("callback", "test_callback_can_stop_training", "test_callback_receives_control_flags")
def _(kit: Kit) -> None:
    one = Stops()
    trainer = kit.trainer(named={"callbacks": [one]}, max_steps=6)
    assert trainer.train().global_step == 2
    assert one.flags == [True, True]


class Named(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc,name-defined]
    """A callback with a state."""

    def __init__(self, value: str = "none") -> None:
        self.value = value

    def state(self) -> dict[str, Any]:
        """The state that checkpoints contain."""
        return {"args": {"value": self.value}, "attributes": {}}


def _resumed(kit: Kit, before: list[Any], after: list[Any]) -> Any:
    options = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    first = kit.trainer(named={"callbacks": before}, **options)
    first.train()
    trainer = kit.trainer(named={"callbacks": after}, restore_callback_states_from_checkpoint=True, **options)
    with mock.patch("transformers.trainer.logger.warning") as warned:
        trainer.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    return trainer, [call[0][0] for call in warned.call_args_list]


def _of(trainer: Any, kind: Any) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, kind)]


STOPPING = transformers.EarlyStoppingCallback


@claims("callback", "test_early_stopping_state_persists", "test_mixed_stateful_and_regular_callbacks")
def _(kit: Kit) -> None:
    trainer, _ = _resumed(kit, [Events(), STOPPING(5, 0.2)], [STOPPING(), Events()])
    (one,) = _of(trainer, STOPPING)
    assert (one.early_stopping_patience, one.early_stopping_threshold) == (5, 0.2)


@claims("callback", "test_multiple_instances_of_same_stateful_callback")
def _(kit: Kit) -> None:
    trainer, _ = _resumed(kit, [Named("first"), Named("second")], [Named(), Named()])
    assert [one.value for one in _of(trainer, Named)] == ["first", "second"]


@claims("callback", "test_missing_stateful_callback_warning")
def _(kit: Kit) -> None:
    _, warned = _resumed(kit, [STOPPING()], [])
    assert any("EarlyStoppingCallback" in text for text in warned)


@claims("callback", "test_trainer_control_state_persists")
def _(kit: Kit) -> None:
    trainer = kit.trainer(max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    place = Path(trainer.args.output_dir) / "checkpoint-2" / "trainer_state.json"
    written(trainer)
    other = kit.trainer(max_steps=2, restore_callback_states_from_checkpoint=True)
    other.state = transformers.TrainerState.load_from_json(str(place))
    other._load_callback_state()
    assert other.control.should_training_stop


@claims(
    "callback",
    "test_evaluate_before_training",
    "test_evaluate_after_training",
    "test_multiple_evaluate_calls",
)
def _(kit: Kit) -> None:
    trainer = kit.trainer(logging_strategy="no", eval_strategy="epoch")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert after[0] == after[1] < before


leaves(
    "callback", NO_TRAINER, "TrainerStateTest (5 tests)", "SwanLabCallbackTest (2 tests)",
    "KubeflowCallbackTest (10 tests)", "TrainerControlTest (5 tests)", "CallbackHandlerTest (4 tests)",
    "EarlyStoppingCallbackTest (4 tests)", "ExportableStateTest (2 tests)",
)  # fmt: skip


# -- test_trainer_checkpointing.py

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}


@claims("checkpointing", "test_save_checkpoints")
def _(kit: Kit) -> None:
    trainer = kit.trainer(**STEPS)
    trainer.train()
    assert checkpoints(trainer) == [3, 6, 9, 12, 15, 16]
    for step in checkpoints(trainer):
        found = {path.name for path in (Path(trainer.args.output_dir) / f"checkpoint-{step}").iterdir()}
        assert found >= {
            "config.json", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin",
            "rng_state.pth",
        }  # fmt: skip
        assert any(name.endswith(".safetensors") for name in found)


@claims("checkpointing", "test_save_collator_tokenizer_by_default")
def _(kit: Kit) -> None:
    class Collator:
        def __init__(self) -> None:
            self.tokenizer = words()
            self.tokenizer.add_tokens(["<new>"])

        def __call__(self, rows: Any) -> Any:
            return padded(rows)

    trainer = kit.trainer(llama(), {"data_collator": Collator()}, max_steps=1, save_strategy="epoch")
    trainer.train()
    written(trainer)
    loaded = transformers.AutoTokenizer.from_pretrained(Path(trainer.args.output_dir) / "checkpoint-1")
    assert len(loaded) == len(trainer.data_collator.tokenizer)


def _resumes(
    kit: Kit, steps: tuple[int, ...] = (3, 9), change: Callable[[Path], None] | None = None,
    prepare: Callable[[Any], None] | None = None, model: Callable[[], Any] = line, **options: Any,
) -> Any:  # fmt: skip
    def made() -> Any:
        trainer = kit.trainer(model(), **STEPS | options)
        if prepare is not None:
            prepare(trainer.model)
        return trainer

    whole = made()
    whole.train()
    for step in steps:
        place = Path(whole.args.output_dir) / f"checkpoint-{step}"
        if kit.staged:
            current_transport().gather_objects(None)
        if change is not None and (not kit.staged or current_transport().rank == 0):
            change(place)
        if kit.staged:
            current_transport().gather_objects(None)
        again = made()
        again.train(resume_from_checkpoint=str(place))
        assert same(kit.weights(whole), kit.weights(again), 0.0)
        assert history(whole) == history(again)
    return again


@claims("checkpointing", "test_can_resume_training")
def _(kit: Kit) -> None:
    _resumes(kit)
    for asked, said in (("missing", "Can't find a valid checkpoint at"), (True, "No valid checkpoint found")):
        trainer = kit.trainer()
        Path(trainer.args.output_dir).mkdir(parents=True, exist_ok=True)
        with raises(ValueError, said):
            trainer.train(resume_from_checkpoint=asked)


@claims("checkpointing", "test_can_resume_training_lm")
def _(kit: Kit) -> None:
    _resumes(kit, (3,), model=lambda: llama().float(), fp16=True)


leaves("checkpointing", "transformers skips it itself", "test_resume_training_with_randomness")


@claims("checkpointing", "test_resume_training_with_different_batch_size")
def _(kit: Kit) -> None:
    first = kit.trainer(max_steps=2, per_device_train_batch_size=2, save_strategy="steps", save_steps=1)
    first.train()
    other = kit.trainer(max_steps=4, per_device_train_batch_size=4)
    other.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-1"))
    assert other._train_batch_size == 4
    assert other.state.global_step == 4


@claims("checkpointing", "test_training_with_resume_from_checkpoint_false")
def _(kit: Kit) -> None:
    assert kit.trainer(max_steps=2).train(resume_from_checkpoint=False).global_step == 2


def shards(folder: Path) -> None:
    """Cut a checkpoint's weights into a file a tensor."""
    state = {n: t for file in folder.glob("model*.safetensors") for n, t in load_file(file).items()}
    for old in (*folder.glob("model*.safetensors"), *folder.glob("*.index.json")):
        old.unlink()
    files = {n: f"model-{k:05}-of-{len(state):05}.safetensors" for k, n in enumerate(state, 1)}
    for name, file in files.items():
        save_file({name: state[name]}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@claims("checkpointing", "test_resume_training_with_shard_checkpoint", "test_resume_training_with_checkpoint")
def _(kit: Kit) -> None:
    _resumes(kit, (3,), shards)


@claims("checkpointing", "test_resume_training_with_gradient_accumulation")
def _(kit: Kit) -> None:
    _resumes(kit, (3,), gradient_accumulation_steps=2)


@claims("checkpointing", "test_resume_training_with_frozen_params")
def _(kit: Kit) -> None:
    again = _resumes(kit, (3,), prepare=lambda model: model.one.requires_grad_(False))
    assert not again.model.one.weight.requires_grad


@claims("checkpointing", "test_multiple_peft_adapters")
def _(kit: Kit) -> None:
    import peft

    def model() -> Any:
        base = llama()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        made = peft.get_peft_model(base, config, "first").double()
        made.add_adapter("second", config)
        return made.double()

    found = []
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = kit.trainer(model(), **options)
    whole.train()
    again = kit.trainer(model(), **options)
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    for trainer in (whole, again):
        folder = kit.folder()
        trainer.save_model(str(folder))
        if kit.staged:
            current_transport().gather_objects(None)
        found.append(load_file(folder / "first" / "adapter_model.safetensors"))
    assert same(found[0], found[1], 0.0)
    assert history(whole) == history(again)


leaves("checkpointing", WEIGHTS, "test_auto_batch_size_finder")
leaves("checkpointing", OTHER, "test_auto_batch_size_with_deepspeed")
refuses("checkpointing", ("test_auto_batch_size_with_resume_from_checkpoint",), auto_find_batch_size=True)
leaves("checkpointing", NO_TRAINER, "test_checkpoint_sorting")


@claims("checkpointing", "test_checkpoint_rotation")
def _(kit: Kit) -> None:
    trainer = kit.trainer(save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer.train()
    assert checkpoints(trainer) == [14, 16]
    for limit, kept in ((2, 2), (1, 1)):
        trainer = kit.trainer(
            save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=limit,
            load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=0.0,
        )  # fmt: skip
        trainer.train()  # the first is the best
        assert checkpoints(trainer) == [2, 16][:kept]


@claims("checkpointing", "test_compare_trainer_and_checkpoint_args_logging")
def _(kit: Kit) -> None:
    first = kit.trainer(max_steps=2, save_strategy="steps", save_steps=2, eval_steps=5)
    first.train()
    other = kit.trainer(
        max_steps=3, per_device_train_batch_size=8, save_strategy="steps", save_steps=10, eval_steps=10
    )
    said: list[str] = []
    where = "transformers.trainer_utils.logger"
    with (
        mock.patch(f"{where}.warning_once", said.append),
        mock.patch(f"{where}.warning", said.append),
    ):
        other.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    text = "\n".join(said)
    assert "save_steps: 10 (from args) != 2 (from trainer_state.json)" in text
    assert "per_device_train_batch_size: 8 (from args) != 4 (from trainer_state.json)" in text


@claims("checkpointing", "test_resume_from_interrupted_training")
def _(kit: Kit) -> None:
    options = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 1}
    first = kit.trainer(named={"train_dataset": Points(50)}, max_steps=2, **options)
    first.train()
    other = kit.trainer(named={"train_dataset": Points(50)}, num_train_epochs=1, **options)
    other.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    steps = math.ceil(math.ceil(50 / 4) / 3)
    assert other.state.global_step == steps
    assert checkpoints(other)[-1] == steps


@claims("checkpointing", "test_resume_batch_order")
def _(kit: Kit) -> None:
    class Seen(Points):
        def __init__(self) -> None:
            super().__init__(10)
            self.order: list[int] = []

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.order.append(index)
            return super().__getitem__(index)

    options = {
        "num_train_epochs": 3, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    data, resumed = Seen(), Seen()
    whole = kit.trainer(named={"train_dataset": data}, **options)
    whole.train()
    other = kit.trainer(named={"train_dataset": resumed}, **options)
    other.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-7"))
    assert resumed.order[-16:] == data.order[-16:]
    assert same(kit.weights(whole), kit.weights(other), 0.0)


refuses(
    "checkpointing",
    (
        "test_checkpoint_manager_initialization", "test_signal_handler_setup", "test_sigterm_handler_flow",
        "test_toggle_checkpoint_flag", "test_execute_jit_checkpoint",
        "test_execute_jit_checkpoint_sentinel_file_cleanup", "test_execute_jit_checkpoint_with_exception",
        "test_jit_checkpoint_callback_set_trainer_enabled",
        "test_jit_checkpoint_callback_on_pre_optimizer_step",
        "test_jit_checkpoint_callback_on_step_begin", "test_jit_checkpoint_callback_on_step_end",
        "test_jit_checkpoint_callback_on_epoch_end", "test_jit_checkpoint_callback_on_train_end",
        "test_kill_wait_period", "test_integration_with_trainer",
    ),
    enable_jit_checkpoint=True,
)  # fmt: skip
leaves(
    "checkpointing", NO_TRAINER, "test_jit_checkpoint_callback_initialization",
    "test_jit_checkpoint_callback_set_trainer_disabled",
)  # fmt: skip


@claims("checkpointing", "test_trainer_saves_tokenizer")
def _(kit: Kit) -> None:
    trainer = kit.trainer(llama(), {"processing_class": words()}, max_steps=1)
    folder = kit.folder()
    trainer.save_model(str(folder))
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    written(trainer)
    for place in (folder, folder / "trained"):
        loaded = transformers.AutoTokenizer.from_pretrained(place)
        assert loaded("w3 w4 w5").input_ids == words()("w3 w4 w5").input_ids


@claims("checkpointing", "test_trainer_saves_feature_extractor")
def _(kit: Kit) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=8000)
    trainer = kit.trainer(
        named={"processing_class": extractor, "data_collator": transformers.default_data_collator},
        max_steps=1,
    )
    trainer.train()
    folder = kit.folder()
    trainer.save_model(str(folder))
    written(trainer)
    loaded = transformers.AutoFeatureExtractor.from_pretrained(folder)
    assert loaded.to_dict() == extractor.to_dict()


leaves("checkpointing", WEIGHTS, "test_trainer_saves_image_processor", "test_trainer_saves_processor")
BEST: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
EACH: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}


def _is_best(kit: Kit, trainer: Any) -> None:
    place = Path(trainer.state.best_model_checkpoint)
    kept = {n: t for file in place.glob("*.safetensors") for n, t in load_file(file).items()}
    assert same(kept, kit.weights(trainer), 0.0)


@claims("checkpointing", "test_load_best_model_with_save_best")
def _(kit: Kit) -> None:
    trainer = kit.trainer(save_strategy="best", save_total_limit=2, max_steps=7, **BEST | EACH)
    trainer.train()
    _is_best(kit, trainer)


@claims("checkpointing", "test_load_best_model_with_save")
def _(kit: Kit) -> None:
    trainer = kit.trainer(max_steps=5, **STEPS | EACH)
    trainer.train()
    assert checkpoints(trainer) == [3, 5]
    trainer = kit.trainer(max_steps=7, save_total_limit=2, **STEPS | EACH | BEST)
    trainer.train()
    assert len(checkpoints(trainer)) == 2
    assert checkpoints(trainer)[-1] == 7
    _is_best(kit, trainer)


class Accuracies:
    """Gives evaluations accuracies of our choice."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __call__(self, found: Any) -> dict[str, float]:
        """The next accuracy."""
        return {"accuracy": self.values.pop(0) if self.values else 0.0}


ACCURACY: dict[str, Any] = {"metric_for_best_model": "accuracy", "greater_is_better": True}


@claims("checkpointing", "test_save_best_checkpoint")
def _(kit: Kit) -> None:
    trainer = kit.trainer(
        named={"compute_metrics": Accuracies(0.60, 0.65, 0.64)}, num_train_epochs=3, eval_strategy="epoch",
        save_strategy="best", **ACCURACY,
    )  # fmt: skip
    trainer.train()
    assert checkpoints(trainer) == [8, 16]


@claims("checkpointing", "test_metric_for_best_model_behavior")
def _(kit: Kit) -> None:
    with raises(ValueError, "metric_for_best_model"):
        kit.trainer(eval_strategy="epoch", save_strategy="best")
    trainer = kit.trainer(eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True)
    assert trainer.args.metric_for_best_model == "loss"


@claims("checkpointing", "test_best_model_checkpoint_behavior")
def _(kit: Kit) -> None:
    trainer = kit.trainer(max_steps=3, save_strategy="steps", save_steps=1, **ACCURACY)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_model_checkpoint) == (None, None)
    assert checkpoints(trainer) == [1, 2, 3]
    for limit, kept in ((None, [1, 2, 3]), (1, [1])):
        trainer = kit.trainer(
            named={"compute_metrics": Accuracies(0.9, 0.8, 0.7)}, max_steps=3, save_strategy="steps",
            save_steps=1,
            eval_strategy="steps", eval_steps=1, save_total_limit=limit, **ACCURACY,
        )  # fmt: skip
        trainer.train()
        assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.9, 1)
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
        assert checkpoints(trainer)[: len(kept)] == kept
    trainer = kit.trainer(
        named={"compute_metrics": Accuracies(0.9, 0.8)}, max_steps=6, save_strategy="steps", save_steps=2,
        eval_strategy="steps", eval_steps=3, **ACCURACY,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert trainer.state.best_model_checkpoint is None


@claims("checkpointing", "test_load_best_model_at_end", "test_load_best_model_from_safetensors")
def _(kit: Kit) -> None:
    trainer = kit.trainer(learning_rate=0.5, **STEPS | EACH | BEST)
    assert not trainer.args.greater_is_better
    trainer.train()
    _is_best(kit, trainer)
    least = min(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    assert trainer.evaluate()["eval_loss"] == least
    trainer = kit.trainer(
        named={"compute_metrics": close}, learning_rate=0.5, metric_for_best_model="accuracy",
        load_best_model_at_end=True, **STEPS | EACH,
    )  # fmt: skip
    assert trainer.args.greater_is_better
    trainer.train()
    _is_best(kit, trainer)


leaves(
    "checkpointing", HUB, "test_push_to_hub", "test_push_to_hub_in_organization",
    "test_push_to_hub_with_saves_each_epoch", "test_push_to_hub_with_saves_each_n_steps",
    "test_push_to_hub_with_tensorboard_logs", "test_push_to_hub_tags", "test_push_to_hub_with_revision",
    "test_push_checkpoint_to_bucket", "test_resume_from_bucket", "test_push_and_resume_with_bucket_prefix",
)  # fmt: skip


# -- test_trainer_optimizers.py


def _own_optimizer() -> dict[str, Any]:
    return {"optimizers": (torch.optim.SGD(line().parameters(), lr=1.0), None)}


refuses(
    "optimizers",
    (
        "test_adafactor_lr_none",
        "test_custom_optimizer",
        "test_reduce_lr_on_plateau_args",
        "test_greedy_lr_args",
    ),
    named=_own_optimizer,
)
for _name, _optim in (
    ("test_bnb_optim", "rmsprop_bnb"), ("test_bnb_8bit_optimizer_skip_embedding", "adamw_8bit"),
    ("test_lomo", "lomo"), ("test_adalomo", "adalomo"), ("test_schedulefree", "schedule_free_adamw"),
    ("test_galore", "galore_adamw"), ("test_galore_extra_args", "galore_adamw"),
    ("test_galore_layerwise_with_scheduler", "galore_adamw_layerwise"),
    ("test_galore_adafactor", "galore_adafactor"), ("test_galore_lr_display_without_scheduler",
    "galore_adamw"),
    ("test_galore_lr_display_with_scheduler", "galore_adamw"), ("test_apollo", "apollo_adamw"),
    ("test_apollo_extra_args", "apollo_adamw"), ("test_apollo_layerwise_with_scheduler",
    "apollo_adamw_layerwise"),
    ("test_apollo_lr_display_without_scheduler", "apollo_adamw"),
    ("test_apollo_lr_display_with_scheduler", "apollo_adamw"),
):  # fmt: skip
    refuses("optimizers", (_name,), optim=_optim)
leaves(
    "optimizers", INSTALLED, "test_grokadamw", "test_stable_adamw", "test_stable_adamw_extra_args",
    "test_stable_adamw_trainer_adamw_args", "test_stable_adamw_lr_display_without_scheduler",
    "test_stable_adamw_lr_display_with_scheduler",
)  # fmt: skip
leaves("optimizers", NO_TRAINER, "test_galore_matched_modules", "test_optimizer_factory_pattern")


@claims("optimizers", "test_get_optimizer_group", "test_get_learning_rates")
def _(kit: Kit) -> None:
    trainer = kit.trainer(learning_rate=5e-5)
    for ask in (trainer.get_optimizer_group, trainer.get_learning_rates):
        with raises(ValueError, "optimizer"):
            ask()
    trainer.create_optimizer()
    assert len(trainer.get_optimizer_group()) == 2
    parameter = trainer.model.one.weight
    assert any(parameter is one for one in trainer.get_optimizer_group(parameter)["params"])
    assert trainer.get_learning_rates() == [5e-5, 5e-5]


@claims("optimizers", "test_no_wd_param_group")
def _(kit: Kit) -> None:
    trainer = kit.trainer(weight_decay=0.1, max_steps=1)
    trainer.train()
    groups = trainer.optimizer.param_groups
    decaying = {id(p) for n, p in trainer.model.named_parameters() if n.endswith("weight")}
    for group in groups:
        assert all((id(p) in decaying) == (group["weight_decay"] > 0) for p in group["params"])


def _rates(kit: Kit, kind: str, more: dict[str, Any], **options: Any) -> list[float]:
    trainer = kit.trainer(
        named=None, lr_scheduler_type=kind, lr_scheduler_kwargs=more, learning_rate=0.2, **options
    )
    trainer.train()
    return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


@claims("optimizers", "test_lr_scheduler_kwargs")
def _(kit: Kit) -> None:
    rates = _rates(kit, "polynomial", {"power": 5.0, "lr_end": 1e-5}, max_steps=10, warmup_steps=2)
    wanted = [0.2 * n / 2 for n in (0, 1)] + [(0.2 - 1e-5) * (1 - (n / 8)) ** 5 + 1e-5 for n in range(8)]
    assert max(abs(a - b) for a, b in zip(rates, wanted, strict=True)) < 1e-12


@claims("optimizers", "test_cosine_with_min_lr_scheduler")
def _(kit: Kit) -> None:
    rates = _rates(kit, "cosine_with_min_lr", {"min_lr": 1e-2}, max_steps=10, warmup_steps=2)
    assert rates[2] == max(rates) == 0.2
    assert all(rate >= 1e-2 for rate in rates[2:])


@claims("optimizers", "test_cosine_with_min_lr_schedule_with_warmup_lr_rate")
def _(kit: Kit) -> None:
    rates = _rates(kit, "cosine_warmup_with_min_lr", {"min_lr": 1e-5}, max_steps=10, warmup_steps=2)
    assert (rates[0], rates[1]) == (0.1, 0.2)
    assert abs(rates[-1] - 1e-5) < 1e-12


@claims("optimizers", "test_reduce_lr_on_plateau")
def _(kit: Kit) -> None:
    rates = _rates(
        kit, "reduce_lr_on_plateau", {"patience": 0, "factor": 0.5, "threshold": 10.0}, num_train_epochs=4,
        eval_strategy="epoch", metric_for_best_model="eval_loss", gradient_accumulation_steps=8,
    )  # fmt: skip
    assert rates[-1] < rates[0]


@claims("optimizers", "test_greedy_lr")
def _(kit: Kit) -> None:
    rates = _rates(
        kit, "greedy", {"patience": 0, "factor": 0.5}, num_train_epochs=4, eval_strategy="epoch",
        metric_for_best_model="eval_loss", gradient_accumulation_steps=8,
    )  # fmt: skip
    assert len(set(rates)) > 1


# -- test_trainer_accelerator.py, test_trainer_hyperparameter.py, test_trainer_seq2seq.py


@claims(
    "accelerator", "test_accelerator_config_empty", "test_accelerator_config_from_dict",
    "test_accelerator_config_from_yaml", "test_accelerator_config_from_dataclass",
    "test_accelerator_config_from_partial",
)  # fmt: skip
def _(kit: Kit) -> None:
    given = {"split_batches": True, "dispatch_batches": True, "use_seedable_sampler": False}
    file = kit.root / "config.json"
    file.write_text(json.dumps(given))
    found = transformers.trainer_pt_utils.AcceleratorConfig(**given)
    for config in (given, str(file), found):
        accelerator = kit.trainer(accelerator_config=config).accelerator
        assert accelerator.split_batches
        assert accelerator.dispatch_batches
        assert accelerator.even_batches
        assert not accelerator.use_seedable_sampler
    accelerator = kit.trainer().accelerator
    assert (accelerator.split_batches, accelerator.dispatch_batches) == (False, None)


@claims(
    "accelerator", "test_accelerate_config_from_dataclass_grad_accum",
    "test_accelerator_config_from_dict_grad_accum_num_steps",
)  # fmt: skip
def _(kit: Kit) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    trainer = kit.trainer(accelerator_config=config)
    assert trainer.args.gradient_accumulation_steps == 4
    assert trainer.train().global_step == 4
    with raises(ValueError, "num_steps"):
        kit.trainer(accelerator_config=config, gradient_accumulation_steps=2)


@claims("accelerator", "test_accelerator_config_not_instantiated")
def _(kit: Kit) -> None:
    with raises(NotImplementedError, "callable"):
        kit.arguments(accelerator_config=transformers.trainer_pt_utils.AcceleratorConfig)


leaves(
    "accelerator", "it is about the state of accelerate, without a trainer", "test_accelerator_custom_state"
)
refuses(
    "hyperparameter",
    ("test_hyperparameter_search (Optuna, Ray, W&B: 5 tests)", "test_hyperparameter_search_ray_client"),
    model=nn.Identity, named=lambda: {"model_init": line},
)  # fmt: skip
leaves("hyperparameter", NO_TRAINER, "test_hyperparameter_search_backends")


def _generates(kit: Kit) -> None:
    kind: Any = transformers.Seq2SeqTrainer
    arguments: Any = transformers.Seq2SeqTrainingArguments
    if kit.staged:
        from counterflow.integrations.transformers import PipelineFields, PipelineTrainerMixin

        kind = type("Staged", (PipelineTrainerMixin, kind), {})
        arguments = dataclasses.make_dataclass("Arguments", (), bases=(PipelineFields, arguments))
    options = {"pp": kit.workers} if kit.staged else {}
    args = arguments(
        output_dir=str(kit.folder()), use_cpu=True, report_to=[], predict_with_generate=True, **options
    )
    kind(model=llama(), args=args, train_dataset=texts(), data_collator=padded)


ROWS.extend(
    Row("seq2seq", name, _generates, refused=True)
    for name in (
        "test_finetune_bert2bert",
        "test_return_sequences",
        "test_bad_generation_config_fail_early",
    )
)
leaves(
    "distributed", OTHER, "tests/trainer/distributed and test_trainer_distributed*.py, test_trainer_fsdp.py"
)
