# Every target does its own set-up: the first `make train` or `make test` on a fresh machine makes $(VENV) and installs the pinned
# versions; later ones start at once. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
EXP ?= experiments/bugfix_grpo.py
RUN ?= $(shell ls -td runs/*/ 2>/dev/null | head -1)
ARGS ?=
ENV :=  # names of experiments/check_env.py, not the shell's variable
FOLDER ?= tests/golden
LOCK_PYTHONS ?= python3.11 python3.12

BIN := $(VENV)/bin
PINS = requirements/$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder  # ARGS="-n 0" for one process, as a debugger needs
PIP := $(BIN)/pip -qq --disable-pip-version-check  # -qq: errors only

# Large pages save about a tenth of a CPU training step; compiled programs are kept, so that only the first run waits for XLA.
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help train eval report atif check-env ablation control smoke bench bench-learner bench-scale bench-gpu bench-kernels bench-inference bench-sandbox bench-envs smollm2 attacks chaos agreement vllm sandbox-image golden notebooks test test-fast lint types lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/base  ## run an experiment: EXP=experiments/bugfix_grpo.py ARGS="optimizer.learning_rate=1e-3 advantage=my_rule.py:rule"
	$(BIN)/python -m agentrl_jax.train $(EXP) $(ARGS)

eval: $(VENV)/base  ## evaluate the policy that an experiment's run ended with, on held-out tasks: EXP=experiments/bugfix_grpo.py
	$(BIN)/python -m agentrl_jax.evaluate $(EXP) $(ARGS)

report: $(VENV)/base  ## write a run's page, made to be opened in a browser: RUN=runs/NAME (default: the latest)
	$(BIN)/python -m agentrl_jax.report $(RUN) $(ARGS)

atif: $(VENV)/base  ## write a run's episodes as trajectories in Harbor's format: RUN=runs/NAME
	$(BIN)/python -m agentrl_jax.report.atif $(RUN) $(ARGS)

check-env: $(VENV)/dev  ## prove the environments: gold solutions score 1, doing nothing and plausible wrong ones 0: ENV=search ARGS="--tasks 500"
	$(BIN)/python -m experiments.check_env $(addprefix --env ,$(ENV)) $(ARGS)

ablation: $(VENV)/dev  ## what the observation mask is worth: the same run with and without it
	$(BIN)/python -m experiments.mask_ablation $(ARGS)

control: $(VENV)/base  ## rewards shuffled among episodes: nothing may be learnt
	$(BIN)/python -m experiments.shuffled_control $(ARGS)

smoke: $(VENV)/base  ## every part of a run in under two minutes, failing where a check of it does not hold
	$(BIN)/python -m experiments.smoke $(ARGS)

bench: $(VENV)/bench  ## speed of the parts, and of PyTorch doing the same (Python 3.11)
	$(BIN)/python -m experiments.bench $(ARGS)

bench-learner: $(VENV)/bench  ## a training step beside transformers on PyTorch, 0.5M to 135M parameters; memory of log-probs (Python 3.11)
	$(BIN)/python -m experiments.bench_learner $(ARGS)

bench-scale: $(VENV)/base  ## programs compiled over 200 ragged batches, time of a step against its tokens, one update on 1 and 8 devices
	$(BIN)/python -m experiments.bench_scale $(ARGS)

bench-gpu: $(VENV)/base  ## a training step of Qwen3-0.6B's shape on this machine's accelerator: tokens/s, MFU, memory; ARGS=--tiny for any
	$(BIN)/python -m experiments.bench_gpu $(ARGS)

bench-kernels: $(VENV)/bench  ## speed of grouping states and of every rule of credit and loss, and of PyTorch doing the same (Python 3.11)
	$(BIN)/python -m experiments.bench_anchors
	$(BIN)/python -m experiments.bench_kernels $(ARGS)

bench-sandbox: $(VENV)/dev  ## starts, commands, forks and snapshots of the sandboxes that work here, beside bare processes: ARGS="--docker --idle 512"
	$(BIN)/python -m experiments.bench_sandbox $(ARGS)

bench-inference: $(VENV)/dev .venv-vllm/pins  ## speed of the embedded engine beside vLLM on CPUs, cost of the client, time of a weight push
	$(BIN)/python -m experiments.bench_inference $(ARGS)

agreement: $(VENV)/dev .venv-vllm/pins  ## log-probs of 10,000 sampled tokens, across updates in flight: engine and vLLM against the trainer
	$(BIN)/python -m experiments.agreement $(ARGS)

bench-envs: $(VENV)/dev  ## scored episodes a second, beside the same commands without any isolation
	$(BIN)/python -m experiments.bench_envs $(ARGS)

attacks: $(VENV)/dev  ## known exploits against every verifier, with its defences on and off: ARGS="--docker"
	$(BIN)/python -m experiments.attacks $(ARGS)

chaos: $(VENV)/dev  ## break servers, boxes and the trainer while they run, and audit the episodes: ARGS="--only sandboxes --times 1"
	$(BIN)/python -m experiments.chaos $(ARGS)

smollm2: $(VENV)/dev  ## fetch a small pretrained model and write it to models/smollm2-135m; ARGS=--check compares it with transformers
	$(BIN)/python -m experiments.smollm2 $(ARGS)

vllm: EXP = experiments/bugfix_vllm.py
vllm: $(VENV)/dev .venv-vllm/pins  ## serve an experiment's policy by vLLM on this machine's CPUs, until Ctrl-C: EXP=experiments/bugfix_vllm.py
	$(BIN)/python -m agentrl_jax.serve .venv-vllm $(EXP) $(ARGS)

sandbox-image: $(VENV)/dev  ## build the image of the Docker sandbox
	$(BIN)/python -m agentrl_jax.sandbox.docker_image

notebooks: $(VENV)/dev  ## run every notebook from top to bottom
	$(BIN)/jupyter execute --timeout=600 notebooks/*.ipynb

golden: $(VENV)/dev  ## every stored number of the reference implementations, in float64: FOLDER=tests/golden
	$(BIN)/python tests/golden/run.py $(FOLDER) $(ARGS)

test: $(VENV)/dev  ## all tests; one that lacks a part says so and is skipped, or fails under REQUIRE_REAL=1
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(VENV)/dev  ## the tests of the one-minute loop
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" --hypothesis-profile=fast $(ARGS)

lint: $(VENV)/dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

lock:  ## resolve the dependencies afresh and pin them: LOCK_PYTHONS="python3.11 python3.12"
	requirements/lock.sh $(LOCK_PYTHONS)

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# vLLM for CPUs has an environment of its own: two minutes, 1.9 GB (Python 3.11).
.venv-vllm/pins: requirements/vllm.txt | $(VENV)/dev
	@$(BIN)/python -m agentrl_jax.inference.vllm_server install .venv-vllm
	@touch $@

# Each of these files stands for a finished installation.
$(VENV)/base: setup.cfg pyproject.toml $(wildcard requirements/py*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'Python 3.11 or newer is needed. Name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'Installing into $(VENV): about a minute and 0.8 GB, this once.'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r $(PINS).txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo 'Installing what tests and checks need into $(VENV): 0.3 GB.'
	@$(PIP) install -r $(PINS)-dev.txt
	@touch $@

$(VENV)/bench: $(VENV)/dev
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo 'The versions to compare with are pinned for Python 3.11: make VENV=.venv311 PYTHON=python3.11 bench' >&2; exit 1; }
	@echo 'Installing PyTorch and transformers into $(VENV): 1 GB.'
	@$(PIP) install -r requirements/py311-bench.txt
	@touch $@
