# Every target does its own set-up: on a fresh machine Python 3.11 or newer and make are enough.
#   make demo     train the recurrent demo policy       (ARGS="--frames 200000 --seed 3")
#   make test     run the tests and doctests            (ARGS="-k sampler -x")
#   make long     the same in the long form: more examples, whole grids, all programs
#   make trainers  run the tests of Tianshou and rl_games, each in an environment of its own
#   make ray      run the tests that need a cluster of Ray
#   make versions  run the tests with the pinned, the newest and the oldest versions allowed (NAMES=oldest picks some)
#   make interop  let other libraries read the files that flatroll writes
#   make simulators  step real simulators, each group in an environment of its own   (NAMES="jax" picks some)
#   make simulators-slow   those that compile for minutes
#   make gpu      run the tests and benchmarks of a GPU, with PYTHON's own packages (torch with CUDA), no network
#   make lint     ruff, mypy --strict, pyright
#   make docs     build the documentation site into out/site, strictly
#   make bench    run the benchmarks, tables to out/bench   (ARGS="collector scan" picks some)
#   make boundaries  count wrong rows at the edges of episodes in many libraries, and write their page   (ARGS="--libraries torchrl")
#   make format   let ruff sort imports and lay out the code
#   make clean    remove .venv and everything that was built
# PYTHON=/path/to/python picks the interpreter for .venv.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
WORKERS ?= 2
# One thread in each process, and what was compiled is kept: both workers and every process of a test would compile
# the same files again, if the second variable came with a value.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test long trainers ray versions interop simulators simulators-slow gpu lint lint-style lint-mypy lint-pyright bench boundaries format constraints clean setup

demo: $(VENV)/.user
	$(BIN)/python -m flatroll demo $(ARGS)

# The workers fill the cores: more torch threads in each would only wait for one another. Each starts with one half
# of the tests in order, so a fixture of a module is mostly made once.
test: $(VENV)/.dev
	$(TEST) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# The quick form, which `make test` runs, has every kind of check; the long form has more of each: random examples
# that differ in each run, every combination of parameters, all programs killed and resumed, README's whole training.
# A test may take longer before it counts as one that hangs.
long: $(VENV)/.dev
	$(TEST) $(BIN)/python -m pytest --long -n $(WORKERS) --dist worksteal -o faulthandler_timeout=1200 $(ARGS)

# Trainers whose pins clash with those in .venv. rl_games warns while it is imported (through torch.compile).
TRAINERS := .venv-trainers
trainers: $(TRAINERS)/tianshou/.ready $(TRAINERS)/rl-games/.ready
	OMP_NUM_THREADS=1 $(TRAINERS)/tianshou/bin/python -m pytest tests/trainers/test_tianshou.py \
		src/flatroll/trainers/tianshou.py $(ARGS)
	OMP_NUM_THREADS=1 $(TRAINERS)/rl-games/bin/python -m pytest -W ignore::DeprecationWarning \
		tests/trainers/test_rl_games.py src/flatroll/trainers/rl_games.py $(ARGS)

# Clusters of Ray on this machine; a test that hangs ends the run.
ray: $(VENV)/.ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/ray $(ARGS)

# The whole suite in each environment: pinned (constraints.txt), newest (no pins) and oldest (the lower bounds in
# pyproject.toml). A name such as python3.13 is newest with that interpreter. Each run writes its row of
# docs/compatibility.md. TORCH=torch==2.13.0 picks another torch for newest and oldest, where only some can be had;
# make -k goes on after an environment that fails.
VERSIONS := .venv-versions
versions: $(addprefix versions-,$(or $(NAMES),pinned newest oldest))

define RUN_VERSIONS
	@mkdir -p out/versions
	OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal --junitxml=out/versions/$(2).xml $(ARGS); \
		status=$$?; $(1)/bin/python docs/versions.py run $(2) out/versions/$(2).xml && exit $$status
endef

versions-pinned: $(VENV)/.dev
	$(call RUN_VERSIONS,$(VENV),pinned)

versions-%: $(VERSIONS)/%/.ready
	$(call RUN_VERSIONS,$(VERSIONS)/$*,$*)

# Files that flatroll writes, read by their own libraries; LeRobot's pins clash with those in .venv.
interop: $(VERSIONS)/interop/.ready
	OMP_NUM_THREADS=1 $(VERSIONS)/interop/bin/python -m pytest -m interop tests/interop $(ARGS)

# Real simulators on the CPU: requirements-GROUP.txt is what an environment holds, test_GROUP*.py what runs in it. Each
# run writes its rows of docs/compatibility/simulators.md, zoo its own page. The first line of the requirements of a slow group says so.
SIMULATORS := $(patsubst tests/simulators/requirements-%.txt,%,$(wildcard tests/simulators/requirements-*.txt))
SLOW = $(foreach group,$(SIMULATORS),$(if $(findstring slow,$(shell head -n 1 tests/simulators/requirements-$(group).txt)),$(group)))
simulators: $(addprefix simulators-,$(or $(NAMES),$(filter-out $(SLOW),$(SIMULATORS))))
simulators-slow: $(addprefix simulators-,$(SLOW))

simulators-%: $(VERSIONS)/simulators-%/.ready
	@mkdir -p out/versions
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -W default -m simulators -o faulthandler_timeout=1200 tests/simulators/test_$**.py \
		--junitxml=out/versions/simulators-$*.xml $(ARGS); \
		status=$$?; $(<D)/bin/python docs/versions.py simulators $* out/versions/simulators-$*.xml && exit $$status

# Nothing is installed: constraints.txt pins torch without CUDA. Only files with such tests are collected, since other
# tests may import what is not there.
gpu:
	PYTHONPATH=src:$$PYTHONPATH $(or $(PYTHON),python3) -m pytest -m "cuda or triton" $(ARGS) \
		$$(grep -rlE 'mark\.(cuda|triton)' --include='test_*.py' tests)
	PYTHONPATH=src:$$PYTHONPATH $(or $(PYTHON),python3) -m flatroll bench --out out/bench gpu

# `make -j2 lint` runs the two type checkers side by side.
lint: lint-style lint-mypy lint-pyright
lint-style: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
lint-mypy: $(VENV)/.dev
	$(BIN)/mypy
lint-pyright: $(VENV)/.dev
	$(BIN)/pyright

# Any warning is an error. The variable leaves out a notice that Material for MkDocs prints at each build.
.PHONY: docs
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "built; to read it: $(BIN)/python -m http.server --directory out/site"

bench: $(VENV)/.dev
	$(BIN)/python -m flatroll bench --out out/bench $(ARGS)

# Each library in an environment of its own under .venv-versions; one that does not install is skipped with its reason.
boundaries: $(VENV)/.dev
	$(BIN)/python -m benchmarks.boundaries.everything $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(VENV)/.dev

# The pins of what .venv holds now, for a commit that moves CI to newer versions.
constraints: $(VENV)/.dev
	@{ sed '/^[^#]/,$$d' constraints.txt; $(PIP) freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(TRAINERS) $(VERSIONS) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up. torch comes first, so that its pin decides for everything that depends on it.
$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt torch hatchling
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.user
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[ray]'
	@touch $@

# The pins of constraints.txt but those that clash.
$(TRAINERS)/tianshou/.ready: CLASHES := filelock|pandas
$(TRAINERS)/rl-games/.ready: CLASHES := psutil
$(TRAINERS)/%/.ready: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m venv --clear $(@D)
	grep -Ev '^($(CLASHES))==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -c $(@D)/constraints.txt torch hatchling
	$(@D)/bin/python -m pip --disable-pip-version-check install -c $(@D)/constraints.txt --no-build-isolation \
		-e '.[$*]' pytest
	@touch $@

# Newest has all extras, JAX and Ray among them. Left out: torchrl, whose bounds keep tensordict below 0.15, and of oldest what asks for newer versions. Oldest has a
# pyparsing in which what Matplotlib 3.8 calls is not deprecated: warnings fail tests.
$(VERSIONS)/newest/.ready: TORCH = torch
$(VERSIONS)/newest/.ready: EXTRAS = all,docs,test
$(VERSIONS)/python%/.ready: TORCH = torch
$(VERSIONS)/python%/.ready: EXTRAS = docs,envpool,minari,test,text
$(VERSIONS)/oldest/.ready: TORCH =
$(VERSIONS)/oldest/.ready: EXTRAS = test
$(VERSIONS)/%/.ready: pyproject.toml docs/versions.py | $(BIN)/pip
	$(if $(filter python%,$*),$*,$(BIN)/python) -m venv --clear $(@D)
	$(if $(filter oldest,$*),$(BIN)/python docs/versions.py oldest pyparsing==3.2.5,echo) $(TORCH) > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -c $(@D)/constraints.txt torch hatchling
	$(@D)/bin/python -m pip --disable-pip-version-check install -c $(@D)/constraints.txt --no-build-isolation \
		-e '.[$(EXTRAS)]'
	@touch $@

# torchvision of the same release as torch, whose own pin of torch would take another build.
$(VERSIONS)/interop/.ready: pyproject.toml tests/interop/requirements.txt constraints.txt | $(BIN)/pip
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -c constraints.txt torch hatchling
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-deps lerobot==0.4.4 torchvision==0.28.0
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-build-isolation \
		-e '.[arrow,h5,minari,pandas,parquet]' -r tests/interop/requirements.txt torch==2.13.0
	@touch $@

# Not the pins of constraints.txt but torch's: simulators ask for other versions. Holds the seconds that it took.
# ALONE comes without its dependencies: Isaac Lab's are the real simulator's, and its episode code runs on Python 3.11.
$(VERSIONS)/simulators-isaaclab/.ready: ALONE = isaaclab==3.0.0
.PRECIOUS: $(VERSIONS)/simulators-%/.ready
$(VERSIONS)/simulators-%/.ready: tests/simulators/requirements-%.txt pyproject.toml | $(BIN)/pip
	$(BIN)/python -m venv --clear $(@D)
	start=$$(date +%s); torch=$$(grep ^torch== constraints.txt); \
		pip="$(@D)/bin/python -m pip --disable-pip-version-check install"; \
		$$pip $$torch hatchling && $$pip --no-build-isolation -e . -r $< $$torch pytest && \
		$(if $(ALONE),$$pip --no-deps --ignore-requires-python $(ALONE) &&) \
		echo $$(($$(date +%s) - start)) > $@

# The first interpreter that is new enough and can make environments. A name on PATH may be a stub that
# does not run, so each is asked.
PROBE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
FIND_PYTHON = $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3 python,$(shell $(name) -c '$(PROBE)' >/dev/null 2>&1 && echo $(name))))

$(BIN)/pip:
	@$(if $(PYTHON),,$(eval PYTHON := $(FIND_PYTHON)))
	@if ! '$(PYTHON)' -c '$(PROBE)' 2>/dev/null; then \
		echo "flatroll needs Python 3.11 or newer with the venv and ensurepip modules;" \
			"found: $(if $(PYTHON),$(PYTHON), none of python3.11, python3.12, python3.13, python3.14, python3, python)." \
			"Install one (Debian: python3.11 and python3.11-venv) or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi
	'$(PYTHON)' -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
