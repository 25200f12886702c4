"""Without an extra's package, the import of what needs it says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from counterflow.integrations import transformers as trainers


@pytest.mark.parametrize("name", ["PipelineTrainer", "PipelineFields"])
def test_the_import_of_a_trainer_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [*sys.modules]:
        if module.startswith((f"{trainers.__name__}.", "transformers")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r'transformers is not installed; pip install "counterflow\[transformers\]"'
    with pytest.raises(ModuleNotFoundError, match=message):
        getattr(importlib.import_module(trainers.__name__), name)
