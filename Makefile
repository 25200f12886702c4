# `make train` and `make test` do all the set-up on a fresh machine: a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train explore browser test test-whole test-fast loaded lint docs house sweep benchmarks mutants clean

# The built-in example: a small GPT on the text that ships with Python, 4 workers, chimera; about two minutes.
train: .venv/.installed
	$(BIN)/counterflow train

# The live page of schedules, plans and runs, in the browser.
explore: .venv/.installed
	$(BIN)/counterflow explore

# Debian's chromium, with which the tests drive that page; without it they are skipped.
browser:
	command -v chromium || { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; }

test: .venv/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal

# All combinations of tables of which `make test` takes a part (tests/tables.py).
test-whole: .venv/.installed
	WHOLE=1 $(BIN)/python -m pytest -n auto --dist worksteal

# All but the slow files (tests/slow.txt): processes, sweeps and real models. Under 90 seconds on 2 cores.
test-fast: .venv/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

# The modules that tests load, compiled once instead of by every worker of pytest.
loaded: .venv/.installed
	$(BIN)/python -m pytest --collect-only > /dev/null

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd benchmarks && ../$(BIN)/mypy --config-file mypy.ini *.py one_gpu
	$(BIN)/lint-imports

# The site, in build/site; a warning ends it, and so does a page that loads anything from elsewhere.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The size of the code, and how many places know one fact.
house: .venv/.installed
	$(BIN)/python benchmarks/house.py

sweep: .venv/.installed
	$(BIN)/python benchmarks/check_sweep.py

# Tables of this machine (about 45 minutes); nothing else should run. Kept ones are in benchmarks/results.
benchmarks: .venv/.installed
	$(BIN)/python benchmarks/simulator_speed.py
	$(BIN)/python benchmarks/engine_cost.py
	$(BIN)/python benchmarks/emulated_device.py --bare
	$(BIN)/python benchmarks/slices_emulated.py
	$(BIN)/python benchmarks/program_times.py
	$(BIN)/python benchmarks/steady_state.py
	$(BIN)/python benchmarks/real_compute.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/page_times.py

# Slips that the tests do not see, module by module (hours); the table is in benchmarks/results/mutants.txt.
mutants: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	nice -n 15 $(BIN)/python benchmarks/mutants.py $(MODULES)

# Modules are compiled when they are first imported: most never are.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist
