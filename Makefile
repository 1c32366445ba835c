# Two commands do everything on a machine with Python (3.10 or newer) and make:
#   make demo    installs, fetches the embedded model, prints the receipt of an answer, writes it as receipt.html
#   make test    installs, runs the tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
READY  := $(VENV)/.ready
PLAIN  := $(VENV)/.plain

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all bench matrix study pictures notebooks lint types clean

demo: $(PLAIN)
	$(BIN)/iglens "What is the capital of Vietnam?" --html receipt.html

# Two workers with one thread each use two cores better than one worker with two threads.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The suite under every supported TransformerLens: 4.3.0, then 3.9.0 and 2.18.0 beside the same torch.
test-all: $(READY)
	bash .ci/versions all

bench: $(READY)
	$(BIN)/python -m benchmarks

# Which model families are read exactly; writes docs/MATRIX.md.
matrix: $(READY) .tl-versions/3.9.0/transformer_lens .tl-versions/2.18.0/transformer_lens
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.matrix

# Does the onset foretell the most damaging ablation? About an hour on two cores; goes on where it was left.
study: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks.onset_study --out study

pictures: $(READY)
	$(BIN)/python docs/make_pictures.py

# Runs every notebook, checks its claims and keeps its outputs; figures get a picture where Chromium is installed.
notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python docs/run_notebooks.py

lint: $(READY)
	$(BIN)/ruff check tl_iglens tests benchmarks

types: $(READY)
	$(BIN)/mypy

$(PLAIN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing tl-iglens and its dependencies into $(VENV) (a minute or two) ..."
	$(PIP) -c constraints.txt -e ".[demo]"
	@touch $@

$(READY): $(PLAIN)
	@echo "installing the tools for development into $(VENV) ..."
	$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

# An older TransformerLens beside the same environment, to stand first on PYTHONPATH.
.tl-versions/%/transformer_lens: | $(READY)
	$(PIP) --no-deps --target .tl-versions/$* "transformer-lens==$*" better-abc

clean:
	rm -rf $(VENV) dist build *.egg-info
