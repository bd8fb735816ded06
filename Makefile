# Everything from one command, in a virtual environment of PyPI's ROS 2 wheels: nothing has to be
# installed or sourced before. On an apt ROS 2 use colcon instead, see docs/building.md.
#
# Every target does its own set-up, and only what is not done yet.

# The interpreter that the environment is made with, 3.10 to 3.13.
PYTHON ?= python3
# jazzy or kilted: which ROS 2 wheels.
ROS_DISTRO_WHEELS ?= jazzy
# Wheels of two distributions cannot share an environment.
VENV ?= $(if $(filter jazzy,$(ROS_DISTRO_WHEELS)),.venv,.venv-$(ROS_DISTRO_WHEELS))
# Where pip takes torch from; empty = the usual index. Its Linux build there has CUDA and several
# GB; https://download.pytorch.org/whl/cpu has one for CPUs.
TORCH_INDEX_URL ?=
# Downloads and converted models; survives `make clean`.
MEMSPEC_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/memspec_ros
# make demo PROMPT='...'; empty = the demo's own. The value is taken as it is, $ and all.
override PROMPT := $(value PROMPT)
# make test PYTEST_ARGS='-k stream -x'
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A sourced ROS 2 would put its own rclpy and libraries before those of the wheels.
ifneq ($(ROS_DISTRO),)
$(info memspec_ros: not using the sourced ROS 2 $(ROS_DISTRO), but the wheels in $(VENV))
unexport AMENT_PREFIX_PATH CMAKE_PREFIX_PATH COLCON_PREFIX_PATH LD_LIBRARY_PATH PYTHONPATH
unexport ROS_DISTRO ROS_PYTHON_VERSION ROS_VERSION
undefine AMENT_PREFIX_PATH
endif

venv_path := $(abspath $(VENV))
# What a ROS prefix that is not sourced lacks. Set by the user: kept.
export AMENT_PREFIX_PATH ?= $(venv_path)
export ROS_AUTOMATIC_DISCOVERY_RANGE ?= LOCALHOST
export ROS_LOG_DIR ?= $(venv_path)/ros_log
export MEMSPEC_CACHE PROMPT ROS_DISTRO_WHEELS
export PIP_DISABLE_PIP_VERSION_CHECK := 1

python := $(VENV)/bin/python
pip := $(python) -m pip
say = @echo "memspec_ros:

# All that is installed, so that what runs is never older than what was edited.
sources := CMakeLists.txt package.xml pyproject.toml README.md LICENSE \
  $(sort $(shell find action cmake config launch memspec_ros models msg scripts srv \
    -type f ! -name '*.pyc' 2>/dev/null))

.PHONY: help
help:
	@echo 'make build   set up $(VENV), build and install the package, fetch the target model'
	@echo "make demo    answer a prompt over ROS 2 (PROMPT='...' for your own)"
	@echo "make test    run the tests (SLOW=1: also the slow ones; PYTEST_ARGS='...')"
	@echo 'make bench   policies against each other and the paper, into build/bench (minutes)'
	@echo 'make lint    run ruff'
	@echo 'make clean   remove $(VENV) and what was built; downloads in $(MEMSPEC_CACHE) stay'
	@echo
	@echo 'Variables: PYTHON ($(PYTHON)), ROS_DISTRO_WHEELS ($(ROS_DISTRO_WHEELS): jazzy, kilted),'
	@echo '           TORCH_INDEX_URL ($(or $(TORCH_INDEX_URL),the usual index)), MEMSPEC_CACHE'

.PHONY: build
build: $(VENV)/.installed target
	$(say) ready in $(VENV)"

.PHONY: demo
demo: build
	$(say) starting the demo"
	@$(VENV)/bin/memspec demo $${PROMPT:+--prompt="$$PROMPT"}

.PHONY: test
test: build
	$(say) running the tests"
	@$(python) -m pytest -m 'not slow' $(PYTEST_ARGS)
ifneq ($(filter-out 0 false,$(CI) $(SLOW)),)
	$(say) running the slow tests"
	@# 5: none was collected, which PYTEST_ARGS can bring about.
	@$(python) -m pytest -m slow $(PYTEST_ARGS) || [[ $$? == 5 ]]
endif

# Reduced: all suites on a few prompts, replayed, nothing timed but the ranker.
.PHONY: bench
bench: build
	$(say) tracing prompts and replaying them"
	@$(VENV)/bin/memspec bench all --prompts docs/bench_prompts.jsonl --prompts-per-domain 2 \
	  --out build/bench --json build/bench/report.json

.PHONY: lint
lint: $(VENV)/.lint-tools
	$(say) running ruff"
	@$(VENV)/bin/ruff check .

.PHONY: clean
clean:
	$(say) removing $(VENV) and what was built"
	@rm -rf $(VENV) build install log .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: target
target: $(VENV)/.installed
	@$(VENV)/bin/memspec fetch

# Each step leaves a stamp in the environment once it has succeeded.

$(VENV)/.created:
	@scripts/check_system.sh '$(PYTHON)'
	$(say) creating the virtual environment $(VENV)"
	@'$(PYTHON)' -m venv --clear $(VENV)
	@touch $@

$(VENV)/.lint-tools: requirements/dev.txt $(VENV)/.created
	$(say) installing ruff"
	@grep '^ruff' $< | $(pip) install --quiet --requirement /dev/stdin
	@touch $@

$(VENV)/.requirements: $(wildcard requirements/*.txt) $(VENV)/.created
	$(say) installing the requirements (several hundred MB, minutes the first time)"
	@if [[ -n "$(TORCH_INDEX_URL)" ]]; then \
	  grep '^torch' requirements/dev.txt | \
	    $(pip) install --index-url '$(TORCH_INDEX_URL)' --requirement /dev/stdin; \
	fi
	@$(pip) install --requirement requirements/dev.txt \
	  --requirement requirements/ros-$(ROS_DISTRO_WHEELS).txt \
	  --requirement requirements/ros-$(ROS_DISTRO_WHEELS)-build.txt
	@touch $@

# Rewritten when a file was added or removed, which no time stamp shows.
$(VENV)/.sources: force | $(VENV)/.created
	@echo '$(sources)' | cmp --silent - $@ || echo '$(sources)' > $@

# Dependencies are there already, from the lists that the package's own metadata is made of. Not
# isolated, so nothing is downloaded again and the build folder can be kept: the next build
# compiles only what has changed (4 s after an edit of a Python file).
$(VENV)/.installed: $(sources) $(VENV)/.sources $(VENV)/.requirements
	$(say) building and installing the package (about a minute the first time)"
	@PATH="$(venv_path)/bin:$$PATH" VIRTUAL_ENV="$(venv_path)" \
	  SKBUILD_BUILD_DIR="build/$(ROS_DISTRO_WHEELS)-{wheel_tag}" \
	  $(pip) install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

.PHONY: force
force:
