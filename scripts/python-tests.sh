#!/usr/bin/env bash
# Tests the Python package as a user has it: a fresh virtual environment, the wheel of scripts/python-wheel.sh, then the
# tests with the notebook and lm-evaluation-harness, the examples in the documentation, and the types.
#
#   scripts/python-tests.sh [WHEEL]    builds the wheel if none is given
#
# Exits with 3 without Python 3.10 or the packages of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' || exit 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python=$work/venv/bin/python
wheel=${1:-}
if [ -z "$wheel" ]; then
    scripts/python-wheel.sh "$work/wheels"
    wheel=$(echo "$work"/wheels/iec-*.whl)
fi
# numpy is the only package that the wheel needs.
"$python" -m pip install --quiet numpy || exit 3
"$python" -m pip install --quiet --no-deps "$wheel"
(cd "$work" && "$python" -c 'import iec, iec.openai; iec.Engine.embedded(threads=1).close()')
"$python" -m pip install --quiet pytest mypy pyright nbclient nbformat ipykernel lm_eval==0.4.13 || exit 3
# Away from the sources, which would be imported instead.
tests=$PWD/crates/python
cd "$work"
"$python" -c 'import iec; print(iec.__version__)'
"$work/venv/bin/iec" --version
"$python" -m pytest --quiet -p no:cacheprovider "$tests/tests"
"$python" - <<'PYTHON'
import doctest, iec, iec.engine, iec.openai, iec.results
modules = (iec, iec.engine, iec.openai, iec.results)
failed = [module.__name__ for module in modules if doctest.testmod(module).failed]
assert not failed, failed
PYTHON
mypy=("$python" -m mypy --strict --no-error-summary --config-file "$tests/pyproject.toml")
"${mypy[@]}" -p iec
"${mypy[@]}" "$tests/examples/generate.py"
installed=$("$python" -c 'import iec, os; print(os.path.dirname(iec.__file__))')
# Files in a virtual environment are left out by default, unless the environment is the directory of the project.
cp -r "$installed" "$work/checked"
"$work/venv/bin/pyright" --pythonpath "$python" "$work/checked" "$tests/examples/generate.py"
echo "the Python package does what its documents say"
