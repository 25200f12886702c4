"""Some claims of transformers' own tests of its Trainer; benchmarks/trainer_claims.py has all of them."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import counterflow as cf

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

ROOT = Path(__file__).parents[2]
QUICK = (
    "test_event_flow",
    "test_num_train_epochs_in_training",
    "test_predict",
    "test_early_stopping_state_persists",
    "test_save_collator_tokenizer_by_default",
    "test_load_best_model_with_save_best",
    "test_no_wd_param_group",
)


@pytest.fixture(scope="module")
def claims() -> Iterator[Any]:
    """The script as a module."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    gc.freeze()  # the trainers collect garbage, also among all that is imported
    yield importlib.import_module("trainer_claims")
    patch.undo()


@pytest.mark.parametrize("name", QUICK)
def test_a_claim_of_the_trainer_holds_in_stages(claims: Any, tmp_path: Path, name: str) -> None:
    (row,) = (row for row in claims.ROWS if row.name == name)

    def run() -> str:
        wrong: str = claims.attempt(row, tmp_path, 1)[0]
        return wrong

    assert cf.launch(run, workers=1, transport="local", threads=1) == [""]
