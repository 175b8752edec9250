# `make demo` and `make test` are all that a fresh machine needs: each makes .venv first when it is
# missing or stale. Arguments go in ARGS: make test ARGS="tests/communication -x".

PYTHON_IN_VENV := .venv/bin/python
# The parts that are plain PyTorch, and the tools without Megatron: these are type-checked.
TYPED := $(wildcard \
	megatron_longseq/errors.py \
	megatron_longseq/attention_inputs.py \
	megatron_longseq/token_layout.py \
	megatron_longseq/communication \
	megatron_longseq/softmax \
	megatron_longseq/lasp/recurrence.py \
	megatron_longseq/metp \
	megatron_longseq/measurement \
	megatron_longseq/planner \
	megatron_longseq/launch)

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## make .venv, or bring it up to date (PYTHON=... chooses the Python)
	@scripts/setup_env.sh

# What the targets below need: says nothing when there is nothing to do.
.PHONY: ready
ready:
	@scripts/setup_env.sh --quiet

.PHONY: setup-bench
setup-bench: ## add to .venv what the benchmarks compare with (DeepSpeed and others)
	@scripts/setup_env.sh --extras dev,bench

.PHONY: demo
demo: ready ## show each method at work on this machine's CPU
	@$(PYTHON_IN_VENV) -m megatron_longseq.cli demo $(ARGS)

# Files of tests go to this many processes: most of a test's time one of its ranks waits or starts.
TEST_WORKERS ?= 2

.PHONY: test
test: ready ## run the tests (TEST_WORKERS=... says in how many processes; default 2)
	@$(PYTHON_IN_VENV) -m pytest -n $(TEST_WORKERS) --dist loadfile $(ARGS)

.PHONY: test-links
test-links: ready ## run the tests over slowed network links (needs root, for network namespaces)
	@test "$$(id -u)" = 0 || \
		{ echo "make test-links needs root, to make network namespaces" >&2; exit 1; }
	@$(PYTHON_IN_VENV) -m pytest tests -m links $(ARGS)

.PHONY: test-thorough
test-thorough: ready ## run the further cases that `make test` leaves out (15 minutes or so)
	@$(PYTHON_IN_VENV) -m pytest tests -m thorough $(ARGS)

.PHONY: lint
lint: ready ## check style and types
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy $(TYPED)

.PHONY: bench-attention
bench-attention: setup-bench ## compare 2D attention with DeepSpeed-Ulysses and others
	@$(PYTHON_IN_VENV) benchmarks/attention.py $(ARGS)

.PHONY: bench-lasp
bench-lasp: setup-bench ## compare linear attention over ranks with Ulysses, LASP's order, ring attention
	@$(PYTHON_IN_VENV) benchmarks/lasp.py $(ARGS)

.PHONY: bench-lasp-model
bench-lasp-model: ready ## measure whole linear models: longest sequence, memory, step time, losses
	@$(PYTHON_IN_VENV) benchmarks/lasp_model.py $(ARGS)

.PHONY: bench-metp
bench-metp: ready ## compare METP with Megatron's tensor parallelism
	@$(PYTHON_IN_VENV) benchmarks/metp.py $(ARGS)

.PHONY: bench-attention-at-scale
bench-attention-at-scale: ready ## compare double rings, kept attention and packed rows (root, for links)
	@$(PYTHON_IN_VENV) benchmarks/attention_at_scale.py $(ARGS)

.PHONY: example-encoder
example-encoder: ready ## train an encoder of linear attention to label Python source; a minute or so
	@$(PYTHON_IN_VENV) scripts/label_text.py $(ARGS)

.PHONY: clean
clean: ## remove caches, build results and the demo's output; keeps .venv
	@rm -rf build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
