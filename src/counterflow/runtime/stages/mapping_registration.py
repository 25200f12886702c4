"""Registration of the classes of mappings that layers pass on."""

from __future__ import annotations

from typing_extensions import override

from counterflow.common.mappings import register_mapping_classes

from ..messages.values import Value
from .named_layer import NamedLayer
from .sample_rows import SampleRows
from .stage_wrappers import Run, StageWrapper


class MappingRegistration(StageWrapper):
    """Registers the mappings that layers pass on as trees, until all their classes were seen."""

    @override
    def breaks_block(self, _: NamedLayer) -> None:
        """Return None: values within a block go through no message."""

    @override
    def wrap_layer(self, _: NamedLayer, run: Run, value: Value, step: int, rows: SampleRows) -> Value:
        output = run(value, step, rows)
        register_mapping_classes(output)
        return output


MAPPINGS = MappingRegistration()
