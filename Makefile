# Fresh machine: `make sweep` or `make test` sets up .venv first. Needs Python 3.11 or newer with pip 22.3 or newer.
PYTHON ?= python3
IN = .venv/bin/python -m

.PHONY: sweep test check cluster wheel clean

sweep: .venv/run  ## set up, then run the main job
	$(IN) accum_sweep -m accum_steps=1,2,4,8

test: .venv/dev  ## set up, then lint, types and tests
	$(MAKE) check

check:
	$(IN) ruff check .
	$(IN) ruff format --check .
	$(IN) mypy
	$(IN) pytest -n logical --maxprocesses 4 --dist loadfile

cluster: .venv/cluster  ## set up, then run the tests that need a cluster
	$(IN) pytest tests/test_slurm.py tests/test_ray.py

wheel: .venv/dev
	$(IN) build --wheel --no-isolation

# --without-pip: Debian's Python has no ensurepip. pip itself installs into the environment from outside.
.venv/bin/python:
	$(PYTHON) -m venv --without-pip .venv

.venv/run: .venv/bin/python pyproject.toml constraints.txt
	$(PYTHON) -m pip --python .venv install -q -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(PYTHON) -m pip --python .venv install -q -c constraints.txt -e '.[dev,hf,peers,postgresql,optuna,slurm]'
	@touch $@ .venv/run

.venv/cluster: .venv/dev
	$(PYTHON) -m pip --python .venv install -q -c constraints.txt -e '.[ray]'
	@touch $@

clean:
	rm -rf .venv dist
