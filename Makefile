# make lab    sets everything up and opens the course        make test   sets up and proves all of it
# Both build .venv once; afterwards they start at once.      PYTHON=/path/to/python3.12 chooses one.

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-cpus check notebooks exercises mistakes mutants bench site check-site constraints
MAKEFLAGS += --no-print-directory
export PYTHON
# The tests start hundreds of interpreters: what one compiles, the next ones load.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist loadfile \
	--no-loadscope-reorder --durations 10 \
	--nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg
CPUS := native avx2 default
SAME := tests/notebooks tests/ps tests/models tests/collectives tests/cost tests/simulator \
	tests/exercises tests/grading notebooks

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## build .venv from constraints.txt; when it is up to date, do nothing
	@sh scripts/setup.sh

lab: setup ## open the course in JupyterLab (ARGS=--no-browser: only print its address)
	@$(BIN)/dtlab lab $(ARGS)

test: check ## run every test: code, notebooks, exercises, browser (ARGS='-k ring' chooses)
	@$(PYTEST) tests notebooks $(ARGS)

# torch's own kernels obey ATEN_CPU_CAPABILITY; matrix products are MKL's, which obey MKL_CBWR.
test-cpus: setup ## check that outputs and grades are the same on three kinds of CPU (CPUS='avx2', SAME=notebooks)
	@for cpu in $(CPUS); do \
		echo "CPU: $$cpu"; \
		case $$cpu in \
			native) set -- ;; \
			avx2) set -- ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ;; \
			default) set -- ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ;; \
			*) echo "there is no CPU $$cpu; take native, avx2 or default" >&2; exit 2 ;; \
		esac; \
		env -u ATEN_CPU_CAPABILITY -u MKL_CBWR "$$@" $(PYTEST) $(SAME) $(ARGS) || exit 1; \
	done

check: setup ## ruff and mypy; notebooks are in the form in which they are committed
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/notebooks.py --check

notebooks: setup ## execute every notebook and write it back, without what differs from run to run
	@$(BIN)/python scripts/notebooks.py $(ARGS)

mistakes: setup ## record what the mistakes leave behind, for the hints; list what is not named
	@$(BIN)/python scripts/mistakes.py $(ARGS)

exercises: setup ## generate exercises/ from solutions/
	@$(BIN)/python scripts/exercises.py $(ARGS)

mutants: setup ## grade every small mutation of every solution; list what loses no points (an hour)
	@$(BIN)/python scripts/mutants.py $(ARGS)

bench: setup ## measure starting ranks and collectives, each beside its peer
	@$(BIN)/dtlab bench launch
	@$(BIN)/dtlab bench collectives

site: setup ## build the course as pages for a browser, in build/site, from the committed notebooks
	@$(BIN)/python site/build.py

check-site: site ## check them: links; in chromium, without a network: errors, widths, accessibility
	@$(BIN)/python site/check.py

constraints: setup ## write constraints.txt from what .venv holds
	@$(BIN)/python scripts/pins.py > constraints.txt.new && mv constraints.txt.new constraints.txt
