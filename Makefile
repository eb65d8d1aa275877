# make demo, make test: each sets up all it needs in a virtual environment of its own.
#   PYTHON      the interpreter, 3.11 or newer                     make test PYTHON=python3.12
#   VENV        where the environment lives                        make test VENV=/tmp/kda
#   VENV_ARGS   for example --system-site-packages, to use the torch that the system has
#   TORCH       what to install where no torch is there yet        make test TORCH=torch==2.11.0

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.13.0
PY := $(VENV)/bin/python

# The requirements of the `cuda` extra, whose one home is pyproject.toml. Without theirs: of CUTLASS only headers are used.
CUDA_EXTRA := import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['cuda'])

.PHONY: demo test test-gpu lint fuzz bench notebooks figures clean

demo: $(VENV)/.ready
	$(PY) -m kda demo

test: $(VENV)/.ready
	$(PY) -m pytest -n auto

# Only what runs on a GPU, in a few minutes; the big-memory tests stay in one process.
test-gpu: $(VENV)/.ready
	$(PY) -m pytest -m gpu -n auto --dist loadgroup

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find kda/cuda -name '*.cu' -o -name '*.cuh' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(PY) -m mypy

fuzz: $(VENV)/.ready
	$(PY) -m kda fuzz --operation all --seconds 600

bench: $(VENV)/.ready
	$(PY) -m kda bench

# Pages with all figures, in build/notebooks.
notebooks: $(VENV)/.ready
	$(PY) -m pip install -q nbconvert
	cd notebooks && OMP_NUM_THREADS=1 ../$(PY) -m jupyter nbconvert --execute --to html --output-dir ../build/notebooks *.ipynb

# The README's: those of two notebooks, and those of what the benchmark measured.
figures: $(VENV)/.ready
	cd notebooks && for n in 01_recurrence 03_exponents; do \
	  OMP_NUM_THREADS=1 KDA_FIGURES=../build/figures ../$(PY) -m jupyter execute $$n.ipynb || exit 1; done
	cp build/figures/01_state.png build/figures/03_map-worst.png notebooks/figures/
	$(PY) -m kda bench --from BENCHMARKS.json --plot notebooks/figures > /dev/null

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'kda needs Python 3.11 or newer: make PYTHON=...')"
	test -x $(PY) || $(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install -q "$(TORCH)"
	$(PY) -m pip install -q -e ".[test,lint]"
	$(PY) -m pip install -q --no-deps $$($(PY) -c "$(CUDA_EXTRA)")
	$(PY) -m pip install -q --no-deps --upgrade --target $(VENV)/fla-0.5 fla-core==0.5.2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
