#!/usr/bin/env bash
# Tests the Python package as a user has it: a fresh virtual environment, the wheel of scripts/python-wheel.sh, then the
# tests, the examples in the documentation, and the types. Exits with 3 without Python 3.10 or the packages of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' || exit 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet numpy pytest mypy || exit 3
scripts/python-wheel.sh "$work/wheels"
"$python" -m pip install --quiet --no-deps "$work"/wheels/iec-*.whl
# Away from the sources, which would be imported instead.
tests=$PWD/crates/python
cd "$work"
"$python" -c 'import iec; print(iec.__version__)'
"$work/venv/bin/iec" --version
"$python" -m pytest --quiet -p no:cacheprovider "$tests/tests"
"$python" - <<'PYTHON'
import doctest, iec, iec.engine, iec.results
failed = [module.__name__ for module in (iec, iec.engine, iec.results) if doctest.testmod(module).failed]
assert not failed, failed
PYTHON
"$python" -m mypy --strict --no-error-summary -p iec
echo "the Python package does what its documents say"
