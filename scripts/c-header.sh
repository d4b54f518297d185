#!/usr/bin/env bash
# Makes the header of the C interface, crates/capi/include/iec.h, or with --check compares it with the sources. Needs
# cbindgen (`cargo install --locked cbindgen`); exits with 3 if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

check=''
case "${1:-}" in
'') ;;
--check) check=1 ;;
*) echo "usage: scripts/c-header.sh [--check]" >&2; exit 2 ;;
esac

if ! command -v cbindgen >/dev/null; then
    echo "cbindgen is not installed" >&2
    exit 3
fi

header=crates/capi/include/iec.h
made=$(mktemp)
trap 'rm -f "$made"' EXIT
cbindgen --quiet --config crates/capi/cbindgen.toml crates/capi --output "$made"
if [ -z "$check" ]; then
    cp "$made" "$header"
elif ! diff -u "$header" "$made"; then
    echo "$header does not belong to the sources; run scripts/c-header.sh" >&2
    exit 1
fi
