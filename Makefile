# make serve, make test: both make .venv when it is missing. Needs Python 3.11 to 3.13 and nothing else.

MODEL ?= demo
PORT ?= 8000
ARGS ?=
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" 2>/dev/null && echo $$name && break; done)
PIP_INSTALL = -m pip install -qq --disable-pip-version-check -c requirements.lock \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
PIP = .venv/bin/python $(PIP_INSTALL)
CLIENTS_PIP = .venv-clients/bin/python -m pip install -qq --disable-pip-version-check

.PHONY: help serve test test-slow lint format demo-model demo-eval lock clean

help:
	@echo "make serve [MODEL=demo] [PORT=8000] [ARGS=\"...\"]   the service on http://127.0.0.1:PORT"
	@echo "make test                                         lint, types, import contracts and tests"
	@echo "make test-slow                                    the tests that take more than ten seconds each"
	@echo "make lint, make format                            the checks alone; layout"
	@echo "make demo-model, make demo-eval                   train the bundled model again; measure it"
	@echo "TORCH_INDEX_URL=... make serve                    also look for torch there (a CPU-only build, for one)"

serve: .venv/serve
	@exec .venv/bin/nanoserve serve $(MODEL) --port $(PORT) $(ARGS)

test: lint
	.venv/bin/python -m pytest -m "not slow"

test-slow: .venv/test
	@$(MAKE) --no-print-directory .venv-clients/done || \
		echo "WARNING: the clients of others could not be installed; their tests are skipped below."
	NANOSERVE_TEST_OPENAI=.venv-clients/openai \
		$$(test -e .venv-clients/done && echo .venv-clients || echo .venv)/bin/python -m pytest -m slow

lint: .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

demo-model: .venv/test
	.venv/bin/python -m demo.train

demo-eval: .venv/test
	.venv/bin/python -m demo.evaluate --min

lock:
	uv pip compile --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --quiet \
		--extra test pyproject.toml -o .venv/all.lock
	{ head -2 requirements.lock; grep -v "^nvidia-\|^cuda-" .venv/all.lock; } > .venv/new.lock
	mv .venv/new.lock requirements.lock

clean:
	rm -rf .venv .venv-clients build dist *.egg-info

KERNELS = setup.py $(wildcard nanoserve/model/kernels/native/*.cpp nanoserve/model/kernels/native/*.h)

# The stamps say what is installed: .venv/serve what a service needs, .venv/test everything.
.venv/serve: .venv/bin/python requirements.lock pyproject.toml $(KERNELS)
	@echo "Installing nanoserve into .venv (some minutes the first time)."
	@$(PIP) -e .
	@touch $@

.venv/test: .venv/bin/python requirements.lock pyproject.toml $(KERNELS)
	@echo "Installing nanoserve and its test tools into .venv (some minutes the first time)."
	@$(PIP) -e ".[test]"
	@touch $@ .venv/serve

# What .venv holds, and real clients over it; beside them openai's major version before the current one.
.venv-clients/done: .venv/test tests/clients/requirements.txt
	@echo "Installing the clients that the slow tests try into .venv-clients."
	@rm -rf .venv-clients
	@.venv/bin/python -m venv .venv-clients
	@.venv/bin/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$(.venv-clients/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	@$(CLIENTS_PIP) -r tests/clients/requirements.txt
	@$(CLIENTS_PIP) --no-deps --target .venv-clients/openai "openai==2.54.0"
	@touch $@

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; none was found. Set PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment; install its venv package (python3-venv)."; exit 1; }
