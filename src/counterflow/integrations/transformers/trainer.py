"""The Trainer of transformers, whose steps a pipeline runs.

The trainer's own loop is unchanged: callbacks, logs, evaluation, schedulers, saving. The batches that it
accumulates are the micro-batches of one step of the pipeline, which also clips and updates; so the loop's
actions after its last batch (clip, update, zero the gradients) only report and do nothing again.

Invariant: a step's loss, gradient norm and update are those of the trainer's ``compute_loss`` in one process,
for any number of workers.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from transformers.trainer_utils import IntervalStrategy

from counterflow import capture
from counterflow.automatic import choose
from counterflow.common.plurals import plural
from counterflow.errors import ConfigError
from counterflow.execution import Batching, Execution
from counterflow.runtime.parameters.optimizers import Parameters
from counterflow.runtime.pipeline import AUTO, Pipeline, ScheduleChoice, ScheduleRequest
from counterflow.runtime.workers.world import current_transport
from counterflow.schedule.ir import Schedule

from .checkpoints import Checkpoints
from .optimizer_view import OptimizerView
from .refusals import refuse, refuse_made
from .trainer_arguments import single_process
from .trainer_objective import PACKED, TrainerObjective, as_it_was, settle_problem_type, weighed, weights
from .trl import add_metrics, plain_head

_BATCHING = Batching(
    per_micro_batch_loss=True,  # the trainer weights the micro-batches
    output_dims={"loss": None, "outputs": 0, "metrics": None},
)


class PipelineTrainerMixin(Checkpoints):
    """Runs a trainer of transformers in pipeline stages: ``class Mine(PipelineTrainerMixin, SFTTrainer)``.

    Every worker makes the same trainer, under torchrun or in a function that ``counterflow.launch`` runs with
    processes; the class of its arguments contains ``PipelineFields``.

    Attributes:
        pipeline: the pipeline; None until it is needed.
        choice: choice of ``schedule="auto"``, with its ``text``; None for another schedule.
        has_fused_head: whether the model's head was TRL's, which returns no logits.

    Raises:
        ConfigError: an argument, which the error names, is not supported.
    """

    has_fused_head: bool = False
    choice: ScheduleChoice | None = None
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments)
        with single_process():
            super().__init__(*args, **kwargs)
        self.has_fused_head = plain_head(self.model)
        refuse_made(self, PipelineTrainerMixin)
        self._collected: list[tuple[dict[str, Any], float]] = []
        self._layers: list[capture.CapturedLayer] = []
        self._step: Any = None
        self._leave_model()

    def _leave_model(self) -> None:
        if not self.accelerator._models:  # noqa: SLF001
            self.accelerator._models.append(self.model)  # noqa: SLF001

    # -- making the pipeline

    def made_pipeline(self, batch: Mapping[str, Any]) -> Pipeline:
        """The pipeline, made when a first batch shows the model's inputs.

        Args:
            batch: inputs of the model, with labels.

        Raises:
            ConfigError: ``compute_loss`` cannot be captured, or switches a module for a call, or depends on
                where packed samples begin; or the layers are too few.
        """
        if self.pipeline is None:
            items = self._get_num_items_in_batch([dict(batch)], torch.device("cpu"))
            settle_problem_type(self.model, batch)
            self._layers, self._first = self._captured(batch, items), _unpacked(batch)
            self._decays = set(self.get_decay_parameter_names(self.model))
            schedule = self.args.made_schedule()
            if self.args.schedule == AUTO:
                self.choice = self._choice(batch, items, schedule)
            self.pipeline = self._pipeline_of(schedule, self.model, self._layers)
        return self.pipeline

    def _captured(self, batch: Mapping[str, Any], items: Any) -> list[capture.CapturedLayer]:
        self._objective = TrainerObjective(self, self.model)  # it must live as long as its layers
        inputs = self._inputs(batch, items)
        packed = {name: batch[name] for name in PACKED if name in batch}
        try:
            with as_it_was(self):
                if packed and self._uses_packed(inputs | {"packed": packed}):
                    raise ConfigError(
                        f"the model depends on {', '.join(packed)}, whose sizes differ from batch to batch; "
                        "use attn_implementation='sdpa', which finds packed samples by their positions"
                    )
                return capture.layers(self._objective, inputs)
        except ConfigError as error:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss cannot run in stages, where it is the forward of an "
                f"Objective: {error}"
            ) from error

    def _uses_packed(self, inputs: Mapping[str, Any]) -> bool:
        return any(layer.uses("packed") for layer in capture.layers(self._objective, inputs, input_dims=None))

    def _pipeline_of(self, schedule: Schedule, model: nn.Module, layers: list[Any]) -> Pipeline:
        choice = self.choice
        return Pipeline(
            model,
            weighed,
            schedule if choice is None else choice.schedule,
            optimizer=self._optimizer_of,
            list_layers=lambda _: layers,
            cuts=self.args.cuts if choice is None else choice.cuts,
            costs=[layer.cost for layer in layers],
            execution=self._execution() if choice is None else choice.execution,
            batching=_BATCHING,
        )

    def _execution(self) -> Execution:
        return Execution(
            seed=self.args.seed,
            recompute=self.args.recompute,
            clip_norm=self.args.max_grad_norm or None,
            autocast="bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else None,
        )

    def _choice(self, batch: Mapping[str, Any], items: Any, schedule: Schedule) -> ScheduleChoice:
        inputs, targets = self._step_inputs(batch, items, schedule)
        request = ScheduleRequest(
            self._layers,
            weighed,
            (inputs, targets),
            self._optimizer_of,
            self._execution(),
            _BATCHING,
            workers=self.args.pp,
            micro_batch=_samples(inputs) // schedule.micro_batches,
        )
        return choose(request, current_transport(alone=True))

    def _step_inputs(self, batch: Mapping[str, Any], items: Any, schedule: Schedule) -> tuple[Any, Tensor]:
        times = schedule.micro_batches
        inputs = pytree.tree_map_only(
            Tensor, lambda tensor: torch.cat([tensor] * times), self._inputs(batch, items)
        )
        samples = _samples(inputs)
        return inputs, weights(samples, factor=1.0, per_sample=0.0, weight=1 / samples)

    def _optimizer_of(self, parameters: Parameters) -> Optimizer:
        if self.optimizer_cls_and_kwargs is not None:
            make, options = self.optimizer_cls_and_kwargs
        else:
            make, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        decaying = [parameter for name, parameter in parameters.named if name in self._decays]
        not_decaying = [parameter for name, parameter in parameters.named if name not in self._decays]
        groups = [
            {"params": decaying, "weight_decay": self.args.weight_decay},
            {"params": not_decaying, "weight_decay": 0.0},
        ]
        optimizer: Optimizer = make([group for group in groups if group["params"]], **options)
        return optimizer

    def _inputs(self, batch: Mapping[str, Any], items: Any) -> dict[str, Any]:
        batch = _unpacked(batch)
        samples = _samples(batch)
        halves = [n for n, v in batch.items() if isinstance(v, Tensor) and v.dim() and 2 * len(v) == samples]
        arguments: dict[str, Any] = {"inputs": {n: v for n, v in batch.items() if n not in halves}}
        if halves:  # of pairs of samples, one number a pair
            arguments["twice"] = {name: torch.cat([batch[name]] * 2) for name in halves}
        if items is not None:
            arguments["items"] = torch.as_tensor(items).repeat(samples)
        return arguments

    # -- a step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a step, if this is its last batch; 0 if more batches are accumulated."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        pipeline = self.made_pipeline(inputs)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        share = 1.0 if scaled else 1 / self.current_gradient_accumulation_steps
        if not scaled or not self._counts_replicas():
            share /= self.args.replicas
        self._collected.append((self._inputs(inputs, num_items_in_batch), share))
        nothing = torch.tensor(0.0, device=self.args.device)
        if not self.accelerator.sync_gradients:
            return nothing
        return nothing + self._update(pipeline)

    def _update(self, pipeline: Pipeline) -> float:
        """Loss of the collected batches, after an update; those that an epoch has left over come first."""
        batches, self._collected = self._collected, []
        count, parts = pipeline.schedule.micro_batches, len(batches) * self.args.replicas
        micro_batches = []
        for objective_inputs, share in batches:
            samples = _samples(objective_inputs["inputs"])
            weight = 1 / samples  # so sums of weights are whole numbers, which no precision rounds
            target = weights(samples, factor=share * parts, per_sample=0.0, weight=weight)
            micro_batches.append((objective_inputs, target))
        loss, first = 0.0, (len(batches) - 1) % count + 1
        for start, stop in pairwise((0, *range(first, len(batches) + 1, count))):
            rows = _filled(micro_batches[start:stop], count)
            self._step = pipeline.step(micro_batches=rows, update=stop == len(batches))
            add_metrics(self, self._step.metrics, (stop - start) * self.args.replicas, training=True)
            loss += float(self._step.loss) * (stop - start) / len(batches)
        self.optimizer.step_was_skipped = self._step.skipped
        return loss

    def _counts_replicas(self) -> bool:
        return bool(self.args.average_tokens_across_devices)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of a step, and the divisor of their losses, over all replicas.

        Raises:
            ConfigError: data without a length ends within a step, and losses are logged by epoch, or an epoch
                has no whole step.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if 0 < len(batches) < num_batches:
            self._refuse_left_over(len(batches), num_batches)
        if items is not None and self.args.replicas > 1 and self._counts_replicas():
            assert self.pipeline is not None
            rows = self.pipeline.transport.gather_objects(float(items))
            items = torch.as_tensor(sum(rows[ranks[0]] for ranks in self.pipeline.ranks)).to(items)
        return batches, items

    def _refuse_left_over(self, batches: int, of_step: int) -> None:
        # The trainer adds their gradients to those of the next epoch's first step, which runs them here.
        by_epoch = self.args.logging_strategy == IntervalStrategy.EPOCH
        if by_epoch or len(self._collected) >= of_step:
            reason = "their loss is of no epoch's step" if by_epoch else "no epoch has as many"
            raise ConfigError(
                f"train_dataset has ended with {plural(batches, 'batch')} of a step's {of_step}, and "
                f"{reason}; take {'logging_strategy=steps' if by_epoch else 'more data'}, or another "
                "gradient_accumulation_steps"
            )

    def get_train_dataloader(self) -> Any:
        """The trainer's data loader, of which each replica has every replicas-th batch."""
        loader = super().get_train_dataloader()
        if self.args.replicas == 1:
            return loader
        batches = BatchSamplerShard(
            loader.batch_sampler, num_processes=self.args.replicas, process_index=self.args.replica
        )
        return DataLoaderShard(
            loader.dataset,
            device=loader.device,
            batch_sampler=batches,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
        )

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        del model
        return torch.tensor(self._step.grad_norm)  # before the pipeline clipped

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        self._leave_model()
        self._collected = []
        if self.pipeline is None:
            with _random_numbers_back():
                batch = next(iter(train_dataloader), None)
            if batch is None:
                raise ConfigError("the training data has no batch; give data to train on")
            self.made_pipeline(self._prepare_inputs(batch))
        assert self.pipeline is not None
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.optimizer = OptimizerView(self.pipeline, self.args.learning_rate)
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.accelerator._optimizers = [self.optimizer]  # noqa: SLF001 - it asks whether a step was skipped
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    # -- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own evaluation, with the random state restored."""
        self._leave_model()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of a batch, on every worker; ``model`` is in the pipeline.

        Raises:
            ConfigError: the batch has no labels and no batch with labels came before it, or outputs are asked
                for that the trainer does not compute.
        """
        del model
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs[name].detach() for name in self.label_names if inputs.get(name) is not None)
        unlabelled = len(labels) < len(self.label_names) and self._takes_labels()
        if unlabelled:
            inputs = self._labelled(inputs)
        if self.has_fused_head and not prediction_loss_only:
            raise ConfigError(
                f"{type(self).__name__} computes no logits in a pipeline; evaluate losses only, or predict "
                "with the saved model"
            )
        items = self._get_num_items_in_batch([inputs], self.args.device)
        pipeline = self.made_pipeline(inputs)
        samples = _samples(_unpacked(inputs))
        target = weights(samples, factor=float(samples), per_sample=0.0, weight=1.0)
        objective_inputs = self._inputs(inputs, items)
        outputs = not prediction_loss_only
        if self._adds_up(items):
            evaluation = pipeline.evaluate(objective_inputs, target, outputs=outputs)
        else:
            micro_batches = _filled([(objective_inputs, target)], pipeline.schedule.micro_batches)
            evaluation = pipeline.evaluate(micro_batches=micro_batches, outputs=outputs)
        add_metrics(self, evaluation.metrics, 1, training=False)
        loss = None if unlabelled else torch.tensor(evaluation.loss, dtype=torch.float64)
        if prediction_loss_only:
            return loss, None, None
        stage_outputs = {} if evaluation.outputs is None else evaluation.outputs["outputs"]
        host_outputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), stage_outputs)
        rows: list[Any] = pipeline.transport.gather_objects(host_outputs)
        row = rows[next(rank for rank in pipeline.ranks[pipeline.replica] if rows[rank])]
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values"])
        logits = tuple(value for name, value in row.items() if name not in ignore_keys)
        told_labels = None if unlabelled or not labels else labels[0] if len(labels) == 1 else labels
        return loss, logits[0] if len(logits) == 1 else logits, told_labels

    def _takes_labels(self) -> bool:
        return type(self).compute_loss is transformers.Trainer.compute_loss

    def _labelled(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        first = getattr(self, "_first", {})
        main = getattr(self.model, "main_input_name", "input_ids")
        if any(first.get(name) is None for name in (main, *self.label_names)):
            raise ConfigError(
                f"a batch has no {' and no '.join(self.label_names)}, but the pipeline is made for a loss; "
                "train or evaluate data with labels before, or predict with the saved model"
            )
        added = {}
        for name in self.label_names:
            example: Tensor = first[name]
            same_shape = example.shape == first[main].shape
            shape = inputs[main].shape if same_shape else (len(inputs[main]), *example.shape[1:])
            added[name] = torch.zeros(shape, dtype=example.dtype, device=inputs[main].device)
        return dict(inputs) | added

    def _adds_up(self, items: Any) -> bool:
        """Check that losses of parts of a batch add up to its loss, so micro-batches may share it."""
        experts = getattr(self.model.config, "output_router_logits", False)
        model_loss = self.compute_loss_func is None and self._takes_labels() and not experts
        return model_loss and items is not None and self._divides()

    def _divides(self) -> bool:
        """Check that the loss is divided by counts over the whole step, so the losses of batches add up."""
        return any(layer.uses("items") for layer in self._layers)


@contextmanager
def _random_numbers_back() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - collators draw from it
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _filled(micro_batches: list[Any], count: int) -> list[Any]:
    empty = pytree.tree_map_only(Tensor, lambda tensor: tensor[:0], micro_batches[0])
    return micro_batches + [empty] * (count - len(micro_batches))


def _unpacked(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in PACKED}


def _samples(inputs: Mapping[str, Any]) -> int:
    return max(len(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())


class PipelineTrainer(PipelineTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` in pipeline stages, with ``PipelineArguments``."""
