"""Trainings with divided experts that go on in one process of plain torch, and back, by four processes."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import counterflow as cf
from counterflow.checkpoints import Checkpoint
from counterflow.integrations.conversion import convert

TESTS = Path(__file__).parents[2]
OWN = runpy.run_path(str(TESTS / "runtime" / "mesh" / "expert_cases.py"))
HF = runpy.run_path(str(TESTS / "models" / "hf" / "expert_cases.py"))
adamw, batch, layers, mean_loss, mesh_of = (
    OWN[name] for name in ("adamw", "batch", "layers", "mean_loss", "mesh_of")
)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def shared_folder() -> Path:
    mesh_of((1, 4), ("replica", "worker"))  # initialises torch.distributed
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


def own_pipeline() -> Any:
    """Two stages by two positions, which have two of four experts each, and shards of the rest."""
    return cf.Pipeline(
        layers(balance=True), mean_loss, cf.schemes.dapple(2, 3), optimizer=adamw, clip_norm=0.1,
        mesh=mesh_of((1, 2, 2), ("replica", "worker", "ep")),
        parallelize=cf.ExpertParallel("ep", fully_shard="ep"),
    )  # fmt: skip


def stepped(pipeline: Any) -> float:
    mine = [tensor.chunk(pipeline.replicas)[pipeline.replica] for tensor in batch()]
    return float(pipeline.step(*mine).loss)


class Alone:
    """The training in one process."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*layers(balance=True))
        self.optimizer = adamw(self.model.parameters())

    def step(self) -> float:
        inputs, targets = batch()
        self.optimizer.zero_grad()
        loss = mean_loss(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        for module in self.model.modules():
            if isinstance(module, cf.TokenBalance):
                module.update()
        return float(loss)

    def state(self, step: int) -> dict[str, Any]:
        """The state with torchtitan's keys."""
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {**self.model.state_dict(), "optimizer": optimizer, "train_state": {"step": step}}

    def read(self, folder: Path) -> int:
        """Go on from a folder, which torch reads without the other processes."""
        state = self.state(0)
        load(state, checkpoint_id=folder, no_dist=True)
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)
        step: int = state["train_state"]["step"]
        return step


def own_layers() -> None:
    """Own layers: EP2 PP2, one process, EP2 PP2; each step has the loss of one training in one process."""
    alone, folder, first = Alone(), shared_folder(), dist.get_rank() == 0
    expected = [alone.step() for _ in range(4)]
    with own_pipeline() as pipeline:
        losses = [stepped(pipeline), stepped(pipeline)]
        cf.save_checkpoint(pipeline, folder / "first")
        state = pipeline.model_state_dict()
        save({"pipeline": pipeline}, checkpoint_id=folder / "stateful")
    dist.barrier()
    if first:
        convert(folder / "first", folder / "titan", torchtitan=True)
        plain = Alone()
        weights = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        reader = HuggingFaceStorageReader(str(folder / "first" / "step-2"))
        load(weights, storage_reader=reader, no_dist=True)  # torch reads the safetensors files too
        torch.testing.assert_close(weights, state, rtol=0, atol=0)
        plain.step()  # the optimiser has state to read into
        assert plain.read(folder / "titan") == 2
        torch.testing.assert_close(plain.model.state_dict(), state, rtol=0, atol=0)
        losses.append(plain.step())
        save(plain.state(3), checkpoint_id=folder / "plain", no_dist=True)
        convert(folder / "plain", folder / "second")
    dist.barrier()
    with own_pipeline() as pipeline:
        assert cf.load_checkpoint(pipeline, folder / "second") == 3
        losses.append(stepped(pipeline))
    if first:
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=1e-11)
    with own_pipeline() as pipeline:  # torch's checkpoint of the pipeline itself
        stepped(pipeline)
        load({"pipeline": pipeline}, checkpoint_id=folder / "stateful")
        assert pipeline.steps == 2
        torch.testing.assert_close(pipeline.model_state_dict(), state, rtol=0, atol=0)
        torch.testing.assert_close(stepped(pipeline), expected[2], rtol=1e-11, atol=1e-11)
    dist.barrier()
    if first:
        shutil.rmtree(folder)


def families() -> None:
    """Models of transformers: EP2 PP2, to torchtitan's names and back, and on in four stages."""
    folder, first = shared_folder(), dist.get_rank() == 0
    texts = HF["tokens"]()
    for kind in ("DeepseekV3", "Qwen3Moe", "GptOss"):
        base, losses = folder / kind, list[float]()
        if first:
            HF["model_of"](kind).save_pretrained(base)
        dist.barrier()

        def pipeline(schedule: Any, dims: dict[str, int], parallelize: Any = None, kind: str = kind) -> Any:
            mesh = mesh_of((1, schedule.workers, *dims.values()), ("replica", "worker", *dims))
            return cf.Pipeline(
                HF["model_of"](kind), cf.models.hf.loss, schedule, optimizer=HF["adamw"], clip_norm=0.1,
                list_layers=cf.models.hf.layers, mesh=mesh, parallelize=parallelize,
            )  # fmt: skip

        experts = cf.ExpertParallel("ep", fully_shard="ep")
        with pipeline(cf.schemes.dapple(2, 2), {"ep": 2}, experts) as divided:
            mine = [tensor.chunk(2)[divided.replica] for tensor in texts]
            losses = [divided.step(*mine).loss, divided.step(*mine).loss]
            cf.save_checkpoint(divided, base / "saved")
        if first:
            convert(base / "saved", base / "titan", base, torchtitan=True)
            convert(base / "titan", base / "back", base)
            saved, back = (Checkpoint.load(base / name, name) for name in ("saved", "back"))
            torch.testing.assert_close(back.weights(), saved.weights(), rtol=0, atol=0)
            torch.testing.assert_close(back.optimizer, saved.optimizer, rtol=0, atol=0)
        dist.barrier()
        with pipeline(cf.schemes.dapple(4, 2), {}) as stages:
            assert cf.load_checkpoint(stages, base / "back") == 2
            losses.append(stages.step(*texts).loss)
        expected = [loss for loss, _ in HF["one_process"](kind, 3)]
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)  # routers compute in float32
    dist.barrier()
    if first:
        shutil.rmtree(folder)
