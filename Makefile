# The verbs of the project. `make demo` and `make test` need nothing but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch this project is tested with; the package itself asks for a range.
TORCH ?= torch==2.13.0
SOURCES := env agents training checkpoints tests
# The agents of the README's table that need no policy.
RIVALS := oracle,fast,mixed,recentred,random,tpe,gp,forest-scratch,best-on-average,knn,coreset,grace
RIVALS := $(RIVALS),forest,transfer-gp,two-way-gp,thompson,greedy

.PHONY: demo test torture torture_kills torture_others lowest check format bench evidence zoo clean

demo: $(VENV)/.demo
	$(BIN)/routepilot demo --out runs/demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

# The long versions of tests/torture, hours of one core, half of them in kills (`make -j2 torture`
# takes two); figures in docs/reliability.md. Under coverage guidance go the readers in Python alone.
KILLS := tests/torture/test_kill.py tests/torture/test_kill_compilers.py
READERS := routes expressions tuning_caches knob_lists shapes limits settings \
	policies bundles results recipes table_texts input_sets
torture torture_kills torture_others: export TORTURE := 1
torture torture_kills torture_others: export TORTURE_REPORT := runs/torture.jsonl
torture: torture_kills torture_others

torture_kills: $(VENV)/.torture
	$(BIN)/python tests/torture/sizes.py
	$(BIN)/python -m pytest $(KILLS)

torture_others: $(VENV)/.torture
	$(BIN)/python -m pytest tests/torture $(addprefix --ignore=,$(KILLS))
	for reader in $(READERS); do \
		$(BIN)/python tests/torture/coverage_guided.py $$reader || exit 1; done

# The tests with the lowest versions that pyproject.toml allows, in a set-up of their own.
lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[demo,dev]' -c tests/lowest.txt '$(TORCH)'
	$(VENV)-lowest/bin/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p routepilot

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m routepilot.training.bench
	$(BIN)/routepilot zoo export -o runs/zoo --names silero_vad,bert,tcn
	$(BIN)/python -m routepilot.training.aa_study --repeats 100 --models runs/zoo/*

# Every figure of the README's evidence, in half an hour or more: the test families on both
# tables, the rivals with one family left out at a time, and across compilers.
JUDGED := --split test --training-seeds 5 --seeds 3 --workers 2 \
	--agents $(RIVALS),bc,ppo,ppo-no-stop
evidence: $(VENV)/.dev
	$(BIN)/routepilot records describe cpu
	$(BIN)/routepilot records describe h200
	$(BIN)/routepilot leakage --table cpu
	$(BIN)/routepilot leakage --table h200
	$(BIN)/routepilot evaluate --table cpu --out runs/evidence/cpu $(JUDGED)
	$(BIN)/routepilot evaluate --table h200 --out runs/evidence/h200 $(JUDGED)
	$(BIN)/routepilot evaluate --table h200 --out runs/evidence/h200-rivals --seeds 1 \
		--agents knn,coreset,grace,greedy --workers 2
	$(BIN)/routepilot evaluate --table h200 --policy cpu --out runs/evidence/across --seeds 2 \
		--agents random,fast,tpe,gp,ppo --workers 2

zoo: $(VENV)/.zoo
	$(BIN)/routepilot zoo check

# Each set-up installs the package in editable form with the extras it needs.
$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

$(VENV)/.zoo: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,zoo]'
	touch $@

# mypy reads the working tree through links that give it the installed names.
$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,dev]'
	mkdir -p $(VENV)/typing/routepilot
	for room in env agents training checkpoints; do \
		ln -sfn ../../../$$room $(VENV)/typing/routepilot/$$room; done
	for file in __init__.py __main__.py py.typed; do \
		ln -sfn ../../../training/public/$$file $(VENV)/typing/routepilot/$$file; done
	touch $@

$(VENV)/.torture: $(VENV)/.dev
	mkdir -p runs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,dev,torture]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist *.egg-info
