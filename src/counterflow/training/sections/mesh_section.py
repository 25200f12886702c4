"""The table ``[mesh]``: the ranks that hold a stage together."""

from __future__ import annotations

from pydantic import model_validator

from counterflow.common.options import option
from counterflow.common.parallel_degrees import DEGREES, Degrees, refuse_degrees

from .keys import Section, count

_MOST = 100_000


class MeshSection(Section):
    """Ranks that hold a stage together, by torchtitan's names. Its dp_replicate is pipeline.replicas, its pp
    the schedule's number of workers.
    """

    dp_shard: int = count(1, _MOST)
    """Positions with samples of their own, over which fully_shard shards weights."""

    cp: int = count(1, _MOST)
    """Positions that share each sequence: context parallelism."""

    tp: int = count(1, _MOST)
    """Positions that share the work of each layer: tensor parallelism."""

    ep: int = count(1, _MOST)
    """Positions among which the experts of a layer are divided: a divisor of dp_shard times cp times tp."""

    ring: bool = option(False, "true or false")
    """Whether keys and values go around the positions of cp; false: they are gathered."""

    @model_validator(mode="after")
    def _check(self) -> MeshSection:
        refuse_degrees({name: getattr(self, name) for name in DEGREES}, "mesh.")
        return self

    @property
    def degrees(self) -> Degrees:
        """Degrees of parallelism inside of a stage."""
        return Degrees(**{name: getattr(self, name) for name in DEGREES})

    def refusal(self, transport: str, *, synchronous: bool, scheme: str) -> str | None:
        """Reason to refuse these degrees with a schedule; None: they are accepted.

        Args:
            transport: name of the transport of a config.
            synchronous: True if the scheme has a flush.
            scheme: name of the scheme.
        """
        if self.degrees.positions == 1:
            return None
        if transport == "local":
            return (
                'pipeline.transport = "local": workers that are threads have no collectives, which [mesh] '
                "needs; choose gloo or nccl"
            )
        if self.degrees.shards > 1 and not synchronous:
            return (
                f"mesh.{'dp_shard' if self.dp_shard > 1 else 'cp'}: {scheme} keeps several versions of its "
                "weights, and those that are gathered are the last ones; choose a synchronous scheme"
            )
        return None
