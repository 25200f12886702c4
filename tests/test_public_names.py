"""What a prompt shows of the package: names to complete, and objects in a line."""

from __future__ import annotations

import inspect
import types

import counterflow as cf
from counterflow.schedule import registry

from . import public_api


def test_every_public_name_completes() -> None:
    assert set(cf.__all__) <= set(dir(cf))
    assert {"Pipeline", "launch", "Skip", "LossSum", "models", "compare"} <= set(dir(cf))
    assert all(hasattr(cf, name) for name in dir(cf))


def test_the_package_names_all_in_its_docstring() -> None:
    groups = str(cf.__doc__).split("\n\n")[1]
    listed = [name.strip() for line in groups.splitlines() for name in line[15:].split(",") if name.strip()]
    assert sorted(listed) == sorted(cf.__all__)


def test_schemes_are_schemes() -> None:
    made = {scheme.build.__name__ for scheme in registry.SCHEMES.values()}
    assert set(dir(cf.schemes)) == made


def test_schedules_and_simulations_fit_a_line() -> None:
    schedule = cf.schemes.zb_v(workers=4, micro_batches=8)
    assert repr(schedule) == "<Schedule zb-v(workers=4, micro_batches=8): 4 workers, 192 ops>"
    assert repr(cf.simulate(schedule)) == (
        "<Simulation of zb-v(workers=4, micro_batches=8): makespan 51, bubbles 5.9%>"
    )


def test_a_change_of_the_api_is_seen() -> None:
    written = public_api.LIST.read_text(encoding="utf-8")
    assert public_api.text() == written, "if the change is meant, run: python tests/public_api.py"


def test_schemes_have_no_other_names() -> None:
    kinds = [getattr(cf.schemes, name) for name in vars(cf.schemes) if not name.startswith("_")]
    made = [scheme.build for scheme in registry.SCHEMES.values()]
    assert all(inspect.unwrap(kind) in made for kind in kinds if not isinstance(kind, types.ModuleType))
