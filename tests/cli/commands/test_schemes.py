from __future__ import annotations

from counterflow.schedule.registry import SCHEMES

from ..conftest import Run


def test_every_scheme_with_its_options(run: Run) -> None:
    answer = run("schemes")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    for scheme in SCHEMES.values():
        assert any(line.startswith(scheme.name) and scheme.summary in line for line in lines)
    assert "dapple, also 1f1b synchronous 1F1B" in lines
    assert "--pairs a divisor of stages/2; default 1 f: pipes in each direction" in lines
    assert any(line.startswith("wpipe") and line.endswith("(asynchronous)") for line in lines)


def test_json(run: Run) -> None:
    shown = run("schemes --json").json
    assert list(shown) == ["format", "schemes"]
    assert [scheme["name"] for scheme in shown["schemes"]] == list(SCHEMES)
    assert next(s for s in shown["schemes"] if s["name"] == "dapple") == {
        "name": "dapple",
        "aliases": ["1f1b"],
        "summary": "synchronous 1F1B",
        "source": "Fan et al. 2021",
        "synchronous": True,
        "directions": "one",
        "options": [
            {
                "name": "stages",
                "legal": "1 or more",
                "required": True,
                "default": None,
                "help": "depth D: stages, one on each worker",
            },
            {
                "name": "micro_batches",
                "legal": "1 or more",
                "required": True,
                "default": None,
                "help": "N: micro-batches of a mini-batch",
            },
            {
                "name": "split",
                "legal": "true or false",
                "required": False,
                "default": False,
                "help": "split backward; weight gradients fill bubbles",
            },
        ],
    }
