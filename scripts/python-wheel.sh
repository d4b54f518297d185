#!/usr/bin/env bash
# Builds the wheel of the Python package, with the program in it: scripts/python-wheel.sh OUT_DIR. Needs Python 3.10 or
# newer; maturin is installed into a virtual environment if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(realpath -m "${1:?usage: scripts/python-wheel.sh OUT_DIR}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
maturin=$(command -v maturin || true)
if [ -z "$maturin" ]; then
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install --quiet 'maturin>=1.9,<2' || exit 3
    maturin=$work/venv/bin/maturin
fi
# Files of a wheel have the time of the last commit, so that two builds are equal.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1)}
cargo build --quiet --locked --release
program=crates/python/data/scripts/iec
mkdir -p "$(dirname "$program")" "$out"
strip -o "$program" "${CARGO_TARGET_DIR:-target}/release/iec"
"$maturin" build --quiet --release --locked --strip --manifest-path crates/python/Cargo.toml --out "$out"
ls -l "$out"/iec-*.whl
