"""Comparison of the workers' runs: under torchrun or Slurm each reads its own config and data.

Invariant: workers compare before anything is made; workers with different runs would each train on.
"""

from __future__ import annotations

from typing import Any, cast

from counterflow.common import toml
from counterflow.errors import ConfigError
from counterflow.runtime.transport.base import Transport

from ..config import RunConfig, by_key

_MAY_DIFFER = {"train.out", "train.resume", "train.threads"}
"""Keys that may differ: rank 0's folder is used, and machines may have different numbers of cores."""

_DATA = "the data"


def check_same_run(config: RunConfig, data: str, transport: Transport) -> None:
    """Refuse workers with other configs or data than rank 0; all workers call it.

    Args:
        config: config of this worker.
        data: digest of the data it trains on.
        transport: transport to the other workers.

    Raises:
        ConfigError: workers differ; the message names the key.
    """
    values = {_DATA: data} | by_key(config.model_dump(mode="json"))
    rows = cast("list[dict[str, Any]]", transport.gather_objects(values))
    first = rows[0]
    for rank, row in enumerate(rows):
        differing = [
            key
            for key in sorted(first.keys() | row.keys())
            if key not in _MAY_DIFFER and first.get(key) != row.get(key)
        ]
        if differing:
            key = differing[0]
            both = " and ".join(toml.shown(rank_values.get(key)) for rank_values in (first, row))
            said = ": the files differ" if key == _DATA else f" = {both}"
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ConfigError(
                f"ranks 0 and {rank} were given different runs: {key}{said}{more}; give every machine the "
                "same config and the same data"
            )
