# One environment in .venv, made on first use; stamp files in it make the second call quick.
#   make demo       train the first tutorial on two processes, live in the terminal
#   make check      lint and the tests that matter for your change, in three minutes
#   make test       format, lint, types, every test that needs no GPU, the notebooks with Colab's Python, torch and
#                   notebook packages, XLA, the libraries that use Accelerate, and a plain install without any of that
#   make test-matrix  the tests in other environments, one after the other: other Pythons, torches and hosted notebooks
#   make test-elsewhere  the notebook tests as if on macOS, as far as that can be pretended
#   make test-libraries-before  the tests of those libraries with the version before of each
#   make docs       the documentation site in build/docs, its tutorials run first; EXECUTE=no leaves that out
#   make pictures   takes the pictures of a run in docs/pictures anew, in a real JupyterLab
#   make bench      our times side by side with Accelerate's and plain torch's; ONLY= measures all that there is
#   make soak       launches, interrupts and kills at random for SOAK_MINUTES (60), until something leaks or hangs
#   make test-gpu   tests/gpu; skips with a reason where there is no CUDA
# PYTHON chooses the interpreter that .venv is made with, and the one that runs test-gpu.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BASE_PYTHON := $(or $(PYTHON),$(shell command -v python3.11 || command -v python3))
VENV := .venv
COLAB := .venv-matrix/colab
XLA := .venv-xla
LIBRARIES := .venv-libraries
DOCS := .venv-docs
PLAIN := .venv-plain
EXTRAS := deepspeed ray stateful tutorial
BEFORE := .venv-libraries-before
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SPEC := pyproject.toml constraints.txt
CODE := $(shell find notebook_accel widgets -name '*.py')

.PHONY: help demo check check-tests test test-unit test-notebooks test-nodes test-rest test-contract test-colab test-xla test-libraries
.PHONY: test-elsewhere test-ray test-docs test-plain test-libraries-before test-gpu test-matrix docs pictures bench soak lint format clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/torch.stamp $(PLAIN)/torch.stamp: constraints.txt
	@echo "== making $(@D) with $(BASE_PYTHON), then torch"
	$(BASE_PYTHON) -m venv $(@D)
	$(@D)/bin/python -I -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	touch $@

$(VENV)/tutorial.stamp: $(VENV)/torch.stamp $(SPEC)
	@echo "== installing notebook_accel for the tutorials"
	$(PIP) --editable '.[tutorial]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp $(SPEC)
	@echo "== installing notebook_accel and the tools of its tests, then DeepSpeed, whose build asks for torch"
	$(PIP) --editable '.[dev,browser-test]'
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation 'deepspeed>=0.19'
	touch $@ $(VENV)/tutorial.stamp $(VENV)/bench.stamp

$(VENV)/bench.stamp: $(VENV)/torch.stamp $(SPEC)
	@echo "== installing notebook_accel and what it is compared with"
	$(PIP) --editable '.[bench]'
	touch $@

# Colab's Python, torch and notebook packages. Without that Python nothing is made, and test-colab says so.
$(COLAB)/stamp: $(VENV)/dev.stamp $(SPEC) tests/xla/cuda_stubs.py $(wildcard tests/matrix/*.py) tests/matrix/images/colab.txt
	@echo "== making $(COLAB) with what Colab has"
	$(PY) -m tests.matrix --only colab --make

# The folder of the target becomes an environment that has what another Python has, pip too.
define make_layer
	$(BASE_PYTHON) -m venv --clear --without-pip $(@D)
	site=$$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	into=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$site')" > "$$into/layer.pth"
endef

# What users have who install the package, and nothing else. setuptools would pack what is in build since the last time.
$(PLAIN)/stamp: $(PLAIN)/torch.stamp $(VENV)/dev.stamp $(SPEC) setup.py README.md $(CODE)
	@echo "== installing the wheel of notebook_accel in $(@D)"
	rm -rf build/lib build/wheel
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(@D)/bin/python -I -m pip uninstall --quiet --yes notebook-accel
	$(@D)/bin/python -I -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	touch $@

# Each extra alone, layered over that.
$(EXTRAS:%=$(PLAIN)/%/stamp): $(PLAIN)/%/stamp: $(SPEC) | $(PLAIN)/stamp
	@echo "== installing the extra $* beside $(PLAIN)"
	$(call make_layer,$(PLAIN)/bin/python)
	DS_BUILD_OPS=0 $(@D)/bin/python -I -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--constraint constraints.txt 'notebook-accel[$*]'
	touch $@

# torch_xla's torch comes first on the path, everything else from $(VENV). That torch asks for 4 GB of CUDA libraries,
# none of which XLA on a CPU calls: where there is a C compiler it gets stubs of them.
$(XLA)/stamp: $(VENV)/dev.stamp constraints-xla.txt tests/xla/cuda_stubs.py
	@echo "== making $(XLA) with torch_xla"
	$(BASE_PYTHON) -m venv --clear $(XLA)
	install="$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-xla.txt"; \
	site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	into=$$($(XLA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$$install --no-deps; \
	$(PY) tests/xla/cuda_stubs.py "$$into" || $$install; \
	echo "import site; site.addsitedir('$$site')" > "$$into/layer.pth"
	touch $@

# The layer comes first here: pip then finds torch and Transformers there, and installs only what is missing or is to be
# another version.
$(LIBRARIES)/stamp $(BEFORE)/stamp $(DOCS)/stamp: .venv-%/stamp: $(VENV)/dev.stamp constraints-%.txt
	@echo "== making $(@D) with what constraints-$*.txt has"
	$(call make_layer,$(PY))
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint <(grep -v ^transformers== constraints.txt) --requirement constraints-$*.txt
	touch $@

# Each lies alone in its folder, which goes first on the path of the kernels that shall have that version.
$(VENV)/kernels/stamp: $(VENV)/dev.stamp constraints-kernels.txt
	@echo "== installing other versions of ipykernel for tests/browser"
	rm -rf $(@D)
	for pin in $$(grep '^ipykernel==' constraints-kernels.txt); do \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target "$(@D)/$${pin/==/-}" "$$pin"; \
	done
	touch $@

# Chromium is the one part that pip does not have. Where apt does not either, the tests that need it say so and skip.
$(VENV)/chromium.stamp: $(VENV)/dev.stamp
	@for name in chromium chromium-browser google-chrome; do command -v $$name && touch $@ && exit; done; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo --non-interactive"; \
	if command -v apt-get >/dev/null && $$as_root true; then \
		echo "== installing Chromium"; \
		export DEBIAN_FRONTEND=noninteractive; \
		$$as_root apt-get update --quiet=2 && \
		$$as_root apt-get install --yes --quiet=2 --no-install-recommends chromium fonts-dejavu-core >/dev/null && \
		touch $@ && exit; \
	fi; \
	echo "== no Chromium and no way to install it: the tests in tests/browser will skip"

# The nodes of tests/nodes are network namespaces, which ip makes; hosts that ssh reaches have an sshd in them. Only root
# can make them: for others no server is installed, no firewall, and no SLURM, whose daemons start as root. After Chromium: one apt-get locks out another.
$(VENV)/iproute2.stamp: $(VENV)/dev.stamp | $(VENV)/chromium.stamp
	@command -v ip && { [ "$$(id -u)" != 0 ] || { command -v ssh && [ -x /usr/sbin/sshd ] && [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/nft ]; }; } && touch $@ && exit; \
	as_root=; packages="iproute2 nftables openssh-client openssh-server slurm-wlm munge"; \
	[ "$$(id -u)" = 0 ] || { as_root="sudo --non-interactive"; packages=iproute2; }; \
	if command -v apt-get >/dev/null && $$as_root true; then \
		echo "== installing $$packages"; \
		export DEBIAN_FRONTEND=noninteractive; \
		$$as_root apt-get update --quiet=2 && \
		$$as_root apt-get install --yes --quiet=2 --no-install-recommends $$packages >/dev/null && \
		touch $@ && exit; \
	fi; \
	echo "== no iproute2, OpenSSH or SLURM and no way to install it: tests in tests/nodes will skip"

demo: $(VENV)/tutorial.stamp
	$(PY) tutorials/run.py tutorials/01_first_launch.ipynb --output build/01_first_launch.ipynb --show "Test accuracy"

# mypy forgets what it knows of one system when it is asked for another, so each has a folder.
lint: $(VENV)/dev.stamp
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	for system in $(or $(SYSTEMS),linux darwin); do \
		$(PY) -m mypy --platform $$system --cache-dir .mypy_cache/$$system notebook_accel widgets || exit 1; \
	done

# BASE is the branch or commit to compare with.
check: $(VENV)/dev.stamp
	$(MAKE) --jobs=2 --output-sync=target check-tests lint SYSTEMS=$$($(PY) -c 'import sys; print(sys.platform)')

check-tests: $(VENV)/dev.stamp
	$(PY) -m tests.check $(if $(BASE),--base $(BASE))

format: $(VENV)/dev.stamp
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# Tests wait for processes much of the time, so there is a lane more than processors. Lanes go side by side where each can
# have shared memory of its own, in which each test looks for leaks. Those that take longest begin first. A process that
# may not write bytecode would compile all our modules anew.
unexport PYTHONDONTWRITEBYTECODE
APART := unshare --mount sh -c 'mount -t tmpfs none /dev/shm && exec "$$0" "$$@"'
CAN_BE_APART = $(shell $(APART) true 2>/dev/null && echo yes)
IF_APART = $(if $(CAN_BE_APART),$(APART)) $(IN_TIME)
# A lane that hangs is interrupted, which shows where, before whoever waits for all of them gives up.
LANES_SECONDS := 4200
IN_TIME = $(if $(LANES_END),timeout --signal=INT --kill-after=60 $$(($(LANES_END) - $$(date +%s))))
NUM_LANES = $(if $(CAN_BE_APART),$(shell $(BASE_PYTHON) -c 'import os; print(os.cpu_count() + 1)'),1)
LANES := test-unit test-nodes test-notebooks test-rest test-colab test-libraries test-contract test-xla test-plain test-docs lint
# A lane whose environment is still being made would begin last, after shorter ones.
ENVIRONMENTS = $(addsuffix /stamp,$(VENV)/kernels $(COLAB) $(LIBRARIES) $(DOCS) $(EXTRAS:%=$(PLAIN)/%) $(if $(HAS_XLA),$(XLA))) $(VENV)/iproute2.stamp
REPORTS := build/reports
REPORT = --junitxml=$(REPORTS)/$@.xml
test:
	rm -rf $(REPORTS)
	-$(MAKE) --keep-going --jobs=$(NUM_LANES) --output-sync=target $(ENVIRONMENTS)
	end=; ! command -v timeout >/dev/null || end=$$(($$(date +%s) + $(LANES_SECONDS))); \
	lanes=0; $(MAKE) --keep-going --jobs=$(NUM_LANES) --output-sync=target LANES_END=$$end $(LANES) || lanes=$$?; \
	$(MAKE) test-ray || lanes=$$?; $(BASE_PYTHON) -m tests.failures $(REPORTS); exit $$lanes

UNIT := tests/differential tests/structure tests/unit
test-unit: $(VENV)/dev.stamp
	$(IF_APART) $(PY) -m pytest $(UNIT) --durations=10 $(REPORT)

test-notebooks: $(VENV)/dev.stamp
	$(IF_APART) $(PY) -m pytest tests/notebooks --durations=10 $(REPORT)

RAY := tests/nodes/test_ray.py
test-nodes: $(VENV)/dev.stamp $(VENV)/iproute2.stamp
	$(IF_APART) $(PY) -m pytest tests/nodes --ignore=$(RAY) --durations=10 $(REPORT)

# All that is not a lane of its own.
ELSEWHERE := $(UNIT) $(addprefix tests/,benchmarks contract docs gpu libraries nodes notebooks plain xla)
test-rest: $(VENV)/dev.stamp $(VENV)/kernels/stamp $(VENV)/chromium.stamp
	$(IF_APART) $(PY) -m pytest tests $(ELSEWHERE:%=--ignore=%) --durations=10 $(REPORT)

# On a busy machine Ray gives up a cluster that starts, so these begin when all else is over.
test-ray: $(VENV)/dev.stamp $(VENV)/iproute2.stamp $(PLAIN)/ray/stamp $(PLAIN)/stamp
	failed=0; $(IF_APART) $(PY) -m pytest $(RAY) --durations=10 $(REPORT) || failed=$$?; \
	for folder in contract plain; do \
		$(IF_APART) $(PY) -m pytest tests/$$folder -k '[ray]' --durations=10 --junitxml=$(REPORTS)/$@-$$folder.xml || \
			failed=$$?; \
	done; exit $$failed

test-contract: $(VENV)/dev.stamp $(VENV)/iproute2.stamp
	$(IF_APART) $(PY) -m pytest tests/contract -k 'not [ray]' --durations=10 $(REPORT)

# What the notebook packages have no part in is tested once, by test-notebooks.
test-colab: $(COLAB)/stamp
	@if [ ! -e $(COLAB)/stamp ]; then echo "== there is no Python as Colab has it: the tests with it are left out"; exit; fi; \
	$(IF_APART) $(COLAB)/bin/python -m pytest tests/notebooks -m "not once" --durations=10 $(REPORT)

test-libraries: $(LIBRARIES)/stamp
	$(IF_APART) $(LIBRARIES)/bin/python -m pytest tests/libraries --durations=10 $(REPORT)

test-docs: $(DOCS)/stamp
	$(IF_APART) $(DOCS)/bin/python -m pytest tests/docs --durations=3 $(REPORT)

test-plain: $(EXTRAS:%=$(PLAIN)/%/stamp) $(PLAIN)/stamp
	$(IF_APART) $(PY) -m pytest tests/plain -k 'not [ray]' --durations=5 $(REPORT)

# Takes a quarter of an hour.
test-libraries-before: $(BEFORE)/stamp
	$(IF_APART) $(BEFORE)/bin/python -m pytest tests/libraries --durations=10

HAS_XLA := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -))
test-xla: $(if $(HAS_XLA),$(XLA)/stamp)
	$(if $(HAS_XLA),$(IF_APART) $(XLA)/bin/python -m pytest tests/xla tests/contract -k xla --durations=5 $(REPORT),@echo "== torch_xla is for Linux on x86_64: its tests are left out")

# A GPU machine brings its own torch, so PYTHON is used as it is and nothing is installed into it.
test-gpu: $(if $(PYTHON),,$(VENV)/dev.stamp)
	$(or $(PYTHON),$(PY)) -m pytest tests/gpu --durations=10

# Takes hours. What nobody could try on macOS itself.
test-elsewhere: $(VENV)/dev.stamp
	NOTEBOOK_ACCEL_TEST_SYSTEM=darwin $(IF_APART) $(PY) -m pytest tests/notebooks --durations=10

# Takes hours. ROWS='--only colab' tries one.
test-matrix: $(VENV)/dev.stamp
	$(PY) -m tests.matrix $(ROWS)

# Each tutorial runs once, and anew when it or the package has changed. That for TPUs needs torch_xla.
EXECUTE := yes
SHOWN := $(patsubst %,build/%,$(filter-out $(if $(HAS_XLA),,%/08_tpu.ipynb),$(wildcard tutorials/*.ipynb)))
docs: $(DOCS)/stamp $(if $(filter no,$(EXECUTE)),,$(SHOWN))
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees \
		$(if $(filter no,$(EXECUTE)),,-D executed=1) . build/docs
	@echo "The site: $(CURDIR)/build/docs/index.html"

build/tutorials/08_tpu.ipynb: RUNNER := $(XLA)/bin/python
build/tutorials/08_tpu.ipynb: | $(XLA)/stamp
$(SHOWN): build/tutorials/%.ipynb: tutorials/%.ipynb tutorials/run.py $(CODE) | $(VENV)/dev.stamp
	NOTEBOOK_ACCEL_VIEW=widget $(or $(RUNNER),$(PY)) tutorials/run.py $< --output $@

pictures: $(VENV)/dev.stamp $(VENV)/chromium.stamp
	$(PY) docs/pictures.py

SOAK_MINUTES := 60
soak: $(VENV)/dev.stamp
	$(PY) -m tests.soak --minutes $(SOAK_MINUTES) $(SOAK)

# What users meet first, in under ten minutes. ONLY='step view' measures these, ONLY= all that there is.
ONLY := first first_cuda launch world import sampler step line offload closure
bench: $(VENV)/bench.stamp
	$(PY) -m tests.benchmarks $(ONLY)

clean:
	rm -rf $(VENV) $(XLA) $(LIBRARIES) $(BEFORE) $(DOCS) $(PLAIN) .venv-matrix build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
