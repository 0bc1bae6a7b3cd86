# The set-up is one rule, $(INSTALLED); every other target but the site stands on it and a second call does not repeat it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := effgpu tests images notebooks docs
# What the site shows, and what its pages link to.
PAGES := $(wildcard *.md docs/*.md docs/*.css notebooks/*.ipynb notebooks/*.md images/*.svg images/*.png) tests/README.md LICENSE
PAGES += tests/patients.py effgpu/predicting/gpus.csv
ADDRESS := $(shell sed -n 's|^Repository = "https://github.com/\(.*\)"|\1|p' pyproject.toml)
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout 600
# The lessons that were asked for first.
ASKED_FOR := 02 03 06 07 08 10 11 15
SIMULATED := simulated-T4 simulated-H100
GPU := $(shell nvidia-smi -L 2>/dev/null)
# Two lessons at once may not fit on one GPU. Three keep two cores busy: tests of processes also wait.
AT_ONCE := $(if $(GPU),1,3)
TEST := OMP_NUM_THREADS=1 EFFGPU_SECONDS=0.1 $(BIN)/python -m pytest tests $(NBVAL) -n $(AT_ONCE) -q
# Short ones, to see that nbval runs them: the slow tests run all lessons, and compare what nbval compares.
BY_NBVAL := 01 06 13 20

.PHONY: help run test test-all test-real lab lint floor predictions renew readme address clean

help:  ## what `make` can do
	@sed -n 's/^\([a-z-]*\):.*## /make \1: /p' $(MAKEFILE_LIST)

run: $(INSTALLED)  ## run every lesson on this machine, write out/report.html
	$(BIN)/effgpu run

test: $(INSTALLED)  ## alone, what needs a GPU; then unit tests, and every notebook through nbval, measurements cut short
	$(if $(GPU),$(BIN)/python -m pytest tests -m gpu -q)
	$(TEST) notebooks -m "not gpu and not slow"

test-all: $(INSTALLED)  ## all tests: every lesson run twice in one kernel, done wrong, with its solutions; four through nbval
	$(if $(GPU),$(BIN)/python -m pytest tests -m gpu -q)
	$(TEST) $(foreach number,$(BY_NBVAL),$(wildcard notebooks/$(number)_*.ipynb)) -m "not gpu"

test-real: $(INSTALLED)  ## with a network: the pretrained weights and public data of the lessons, 2 GB
	EFFGPU_REAL=1 $(BIN)/python -m pytest tests -m real -q

simulated: $(SIMULATED)  ## eight lessons on a simulated T4 and a simulated H100, cut short; with -j2 both at once

$(SIMULATED): simulated-%: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulated_gpu $* $(BIN)/effgpu run $(ASKED_FOR) --seconds 0.1 --out out/simulated/$*

lab: $(INSTALLED)  ## JupyterLab on the lessons
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks  # which serves their pictures, in images/, too

lint: $(INSTALLED)  ## ruff
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

floor:  ## the tests on the lowest versions that pyproject.toml admits
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet uv
	VIRTUAL_ENV=$(CURDIR)/.venv-floor .venv-floor/bin/uv pip install --resolution lowest-direct -e ".[dev]"
	touch .venv-floor/.installed
	$(MAKE) test-all VENV=.venv-floor

readme: $(INSTALLED)  ## README's lines on the lessons and its picture, and the map of the course, from the committed notebooks
	$(BIN)/python tests/test_readme.py

predictions: $(INSTALLED)  ## docs/predict.md: predicted peaks and times of published runs beside the published ones
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m benchmarks.predictions

renew: $(INSTALLED)  ## predict anew in the lessons that store what a GPU measured, after a change of the rules
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m benchmarks.renew

site: .venv-site/.installed  ## out/site: the lessons as they are stored, the map and the docs, as pages
	@rm -rf out/pages && mkdir -p out/pages && tar cf - $(PAGES) | tar xf - -C out/pages
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict  # not --quiet, with which it overlooks warnings

address:  ## point every badge, Colab cell and picture at a published copy: make address REPO=you/effgpu
	@echo "$(REPO)" | grep -Eq '^[A-Za-z0-9_-]+/[A-Za-z0-9._-]+$$' || { echo "usage: make address REPO=you/effgpu"; exit 2; }
	perl -pi -e 's|\Q$(ADDRESS)\E|$(REPO)|g' pyproject.toml mkdocs.yml README.md docs/*.md notebooks/*.ipynb
	perl -pi -e 's|\]\(\.\./images/|](https://raw.githubusercontent.com/$(REPO)/main/images/|g' notebooks/*.ipynb

clean:  ## remove what was installed; results in out/ stay
	rm -rf $(VENV) .venv-floor .venv-site

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e ".[dev]"
	touch $@

.venv-site/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --upgrade pip
	.venv-site/bin/python -m pip install --quiet --group site
	touch $@
