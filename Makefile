# Each target sets up what it needs in .venv: Python 3.11, gcc, make, cmake and a package index are enough.
#
#   make bench [ARGS="..."]   the benchmark (python -m bench.run)
#   make test  [ARGS="..."]   pytest against the installed package, file by file on two cores
#   make lint                 ruff, mypy, clang-format: nothing is changed
#   make sanitize [ARGS="60 1"]  the native stress program under the sanitizers; seconds each, and seed
#   make clean                remove .venv and everything built

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.hpp' -o -name '*.h')
FAKE_CUDA = $(filter-out %/selftest.cpp,$(wildcard tests/fake_cuda/*.cpp))
# The folders as well, whose time changes when a file goes.
PACKAGE_FILES := $(shell find src/gdsstream csrc -name '*.py' -o -name '*.pyi' -o -name '*.[ch]pp' \
	-o -type d -not -name __pycache__)

.PHONY: bench test lint sanitize sanitize-asan sanitize-tsan clean
.DELETE_ON_ERROR:

bench: .venv/installed
	$(BIN)/python -m bench.run $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# The build tools come first and into the environment itself: a build isolated from it would fetch its own. torch is
# named alone, with its exact version, so that a CPU build among pip's sources is preferred to gigabytes of CUDA.
.venv/tools: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(PIP) install -c constraints.txt scikit-build-core nanobind ninja
	touch $@

# Not editable: tests see what users get.
.venv/installed: .venv/tools pyproject.toml CMakeLists.txt $(PACKAGE_FILES)
	$(PIP) install --no-build-isolation -c constraints.txt '.[dev]'
	touch $@

# Instruments the stand-in driver too: ThreadSanitizer knows of no order that an uninstrumented library makes.
sanitize: sanitize-asan sanitize-tsan
sanitize-asan: SANITIZER := address,undefined
sanitize-tsan: SANITIZER := thread
sanitize-asan: export ASAN_OPTIONS := detect_stack_use_after_return=1:strict_init_order=1
sanitize-asan: export UBSAN_OPTIONS := print_stacktrace=1
sanitize-tsan: export TSAN_OPTIONS := halt_on_error=1:second_deadlock_stack=1
sanitize-asan sanitize-tsan: sanitize-%:
	cmake -S . -B build/$* -DGDSSTREAM_PYTHON=OFF -DGDSSTREAM_STRESS=ON -DGDSSTREAM_SANITIZER=$(SANITIZER)
	cmake --build build/$* --parallel 2
	$(CXX) -std=c++20 -O1 -g -fPIC -shared -pthread -fno-omit-frame-pointer -fsanitize=$(SANITIZER) \
		-fno-sanitize-recover=all $(FAKE_CUDA) -o build/$*/libfakecuda.so
	GDSSTREAM_LIBCUDA=$(CURDIR)/build/$*/libfakecuda.so build/$*/gdsstream_stress $(ARGS)

clean:
	rm -rf .venv build
