#!/usr/bin/env bash
# Lists the public surface of the library in docs/public-api.txt, or with --check compares the list with the sources.
# Needs cargo-public-api (`cargo install --locked cargo-public-api`); exits with 3 if it is missing or does not know the
# format of this compiler's descriptions.
set -euo pipefail
cd "$(dirname "$0")/.."

check=''
case "${1:-}" in
'') ;;
--check) check=1 ;;
*) echo "usage: scripts/public-api.sh [--check]" >&2; exit 2 ;;
esac

tool=$(command -v cargo-public-api || true)
if [ -z "$tool" ]; then
    echo "cargo-public-api is not installed" >&2
    exit 3
fi

# The description is an unstable output, which the stable compiler has, too. Promised types are defined in hidden modules,
# so that hidden items are described, and those that lie in a module are left out of the list.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=${IEC_API_TARGET:-target/public-api}
RUSTC_BOOTSTRAP=1 cargo rustdoc --quiet --locked --lib --no-default-features --target-dir "$target" -- \
    -Z unstable-options --output-format json --document-hidden-items --cap-lints allow
if ! "$tool" public-api --rustdoc-json "$target/doc/iec.json" -sss >"$work/all" 2>"$work/error"; then
    cat "$work/error" >&2
    exit 3
fi
awk '/^pub mod / || !match($0, /iec::[A-Za-z0-9_]+(::)?/) { next }
    { path = substr($0, RSTART, RLENGTH) }
    path ~ /^iec::[a-z0-9_]+::$/ && path != "iec::error::" { next }
    { print }' "$work/all" | LC_ALL=C sort -u >"$work/list"

if [ -z "$check" ]; then
    cp "$work/list" docs/public-api.txt
    exit
fi
if ! diff -u docs/public-api.txt "$work/list"; then
    echo "the public surface changed; run scripts/public-api.sh, and tell users in CHANGELOG.md" >&2
    exit 1
fi
