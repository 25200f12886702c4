"""The table ``[pipeline]``: how the schedule is executed, and on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from counterflow.common.options import option
from counterflow.execution import Configured
from counterflow.runtime.transport.kinds import kinds

from .keys import AUTO, Section, WholeNumbers, count


def _as_transport(name: str) -> str:
    if name not in _TRANSPORTS:
        raise ValueError(name)
    return name


_TRANSPORTS = AUTO, *(kind.name for kind in kinds(trains=True))
TransportKey = Annotated[str, AfterValidator(_as_transport)]


class PipelineSection(Section, Configured):
    """Execution of the schedule: transport, replicas, recomputation and the like."""

    model_config = Section.model_config

    if not TYPE_CHECKING:
        __init__ = BaseModel.__init__  # errors are reported for the whole config

    replicas: int = count(1, 100_000)
    """W: copies of the whole pipeline group"""

    transport: TransportKey = option("auto", f"one of {', '.join(_TRANSPORTS)}")
    """Transport of messages; auto: nccl if there is a GPU for each worker, otherwise gloo on the CPU; local:
    workers are threads of one process.
    """

    cuts: WholeNumbers | str | None = option(None, "a list of whole numbers, or a layout in quotes")
    """Layers at which a new stage begins, counted from 0, or a layout of Megatron-LM, "Et*3|t*3,L"; default:
    balanced.
    """

    @model_validator(mode="before")
    @classmethod
    def _only_keys(cls, data: Any) -> Any:
        known = cls.keys_known()
        wrong = [
            InitErrorDetails(type="extra_forbidden", loc=(name,), input=data[name])
            for name in (data if isinstance(data, dict) else ())
            if name in cls.model_fields and name not in known
        ]
        if wrong:
            raise ValidationError.from_exception_data("pipeline", wrong)
        return data
