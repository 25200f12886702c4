"""Runs as TrainJobs of Kubeflow Trainer v2: what a job and its runtime say, as resources of Kubernetes.

In a pod Kubeflow sets ``PET_NNODES``, ``PET_NPROC_PER_NODE``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and
``PET_MASTER_PORT``, which torchrun reads. The runtime's command adds that pods meet at the first one, so
torchrun starts the workers of all pods again after a failure. After the loss of a pod Kubernetes starts all
pods again, and the run goes on in its folder.

Invariant: resources are plain data, which Kubeflow's own models accept without a rest.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from counterflow.common.extras import imported
from counterflow.errors import ConfigError
from counterflow.training.config import RunConfig

_VERSION = "trainer.kubeflow.org/v1alpha1"

_GRACE_SECONDS = 300
"""Time that a pod has to end, for a step and a checkpoint."""

_KILL_SECONDS = 30
"""Time before the pod's end at which torchrun kills workers that have not ended."""

_COMMAND = (
    "exec torchrun --rdzv-backend c10d --rdzv-id counterflow "
    '--rdzv-endpoint "$PET_MASTER_ADDR:$PET_MASTER_PORT" '
    '--rdzv-conf "is_host=$([ "$PET_NODE_RANK" = 0 ] && echo 1 || echo 0)" '
    f'--shutdown-timeout {_GRACE_SECONDS - _KILL_SECONDS} "$@"'
)
"""What a pod runs, with a job's words behind it: the first pod hosts the store, whatever its names are."""


def runtime(
    image: str, claim: str, *, name: str = "counterflow", folder: str = "/runs", max_restarts: int = 3
) -> dict[str, Any]:
    """A runtime for jobs of Counterflow, which an administrator applies once.

    Args:
        image: image with Counterflow, as ``examples/Dockerfile`` makes it.
        claim: name of a PersistentVolumeClaim that all pods may write (``ReadWriteMany``).
        name: name of the runtime.
        folder: where the claim is mounted.
        max_restarts: maximum restarts of all pods after one is gone.
    """
    container = {
        "name": "node",
        "image": image,
        "command": ["sh", "-c", _COMMAND, "counterflow"],
        "volumeMounts": [{"name": "runs", "mountPath": folder}, {"name": "memory", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    node = {
        "name": "node",
        "template": {"metadata": step, "spec": {"backoffLimit": 0, "template": {"spec": pod}}},
    }
    return {
        "apiVersion": _VERSION,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {"failurePolicy": {"maxRestarts": max_restarts}, "replicatedJobs": [node]},
            },
        },
    }


def train_job(
    config: RunConfig,
    file: str,
    *,
    nodes: int = 1,
    gpus: bool = True,
    max_restarts: int = 10,
    runtime: str = "counterflow",
) -> dict[str, Any]:
    """A job that trains as a config says and goes on in the run's folder.

    Args:
        config: config of the run; its workers are divided among the pods, and the job's name is that of
            ``train.out``, a folder of the pods.
        file: path of that config in the pods.
        nodes: number of pods.
        gpus: whether each worker takes a GPU.
        max_restarts: maximum restarts of the workers by torchrun.
        runtime: name of the runtime.

    Raises:
        ConfigError: the workers do not divide among the pods, or the config names no folder.
    """
    here, rest = divmod(config.processes, nodes)
    if rest or not here:
        raise ConfigError(
            f"{nodes} pods for {config.processes} workers: each pod needs as many; choose a divisor of "
            f"{config.processes}"
        )
    if config.train.out is None:
        raise ConfigError(
            "train.out is missing: pods that are started again have to find their run; name its folder"
        )
    words = ["-m", "counterflow", "train", file, "--out", str(config.train.out), "--set", "train.resume=auto"]
    trainer: dict[str, Any] = {
        "numNodes": nodes,
        "numProcPerNode": here,
        "args": words,
        "env": [{"name": "PET_MAX_RESTARTS", "value": str(max_restarts)}],
    }
    if gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(here)}}
    return {
        "apiVersion": _VERSION,
        "kind": "TrainJob",
        "metadata": {"name": PurePosixPath(config.train.out).name},
        "spec": {"runtimeRef": {"name": runtime}, "trainer": trainer},
    }


def check(resource: dict[str, Any]) -> None:
    """Refuse a resource that Kubeflow's models do not accept, or of which they would drop a part.

    Raises:
        ConfigError: a value is not legal or a key is unknown, or kubeflow-trainer-api is not installed.
    """
    models = imported("kubeflow_trainer_api.models", "kubeflow")
    model = getattr(models, f"TrainerV1alpha1{resource['kind']}")
    try:
        known = model.from_dict(resource).to_dict()
    except ValueError as error:
        raise ConfigError(f"{resource['kind']}: Kubeflow does not accept it: {error}") from error
    if known != resource:
        lost = next(_differences(resource, known, resource["kind"]))
        raise ConfigError(f"{lost}: Kubeflow knows no such key; leave it out")


def _differences(resource: Any, known: Any, place: str) -> Any:
    if isinstance(resource, dict) and isinstance(known, dict):
        for key, value in resource.items():
            if key not in known:
                yield f"{place}.{key}"
            else:
                yield from _differences(value, known[key], f"{place}.{key}")
    elif isinstance(resource, list) and isinstance(known, list):
        for number, (item, known_item) in enumerate(zip(resource, known, strict=True)):
            yield from _differences(item, known_item, f"{place}[{number}]")
    elif resource != known:
        yield place
