#!/usr/bin/env bash
# Makes src/runtime/cuda/kernels/compute_*.ptx, the kernels that the program carries, from kernels.cu beside them.
# Usage: scripts/ptx.sh [--check] [-v]
#   (nothing)   writes them
#   --check     compares with what is there, byte by byte, and assembles it for every GPU that is supported
#   -v          with --check: prints registers, spills and shared memory of each kernel
# Needs Python and, the first time, the network: the compiler comes from PyPI, pinned, to ${XDG_CACHE_HOME:-~/.cache}/iec-cuda. Exit
# code 3 where it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

check='' verbose=''
for word in "$@"; do
    case $word in
        --check) check=1 ;;
        -v) verbose=-v ;;
        *) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;;
    esac
done

command -v python3 >/dev/null || { echo "python3 is missing" >&2; exit 3; }
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "the compiler is for x86-64 Linux" >&2; exit 3; }
packages=tests/reference/cuda_tools.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/iec-cuda
tools=$cache/$(sha256sum "$packages" | cut -c -16)
if [ ! -d "$tools" ]; then
    mkdir -p "$cache"
    new=$(mktemp -d "$cache/new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    python3 -m venv "$new/venv" &&
        "$new/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
            --target "$new/tools" -r "$packages" || { echo "the compiler of $packages cannot be fetched" >&2; exit 3; }
    mv -T "$new/tools" "$tools" 2>/dev/null || [ -d "$tools" ]
fi

kernels=src/runtime/cuda/kernels
make="python3 tests/reference/make_ptx.py"
if [ -z "$check" ]; then
    $make compile "$tools" "$kernels" "$kernels"
    exit
fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
$make compile "$tools" "$kernels" "$made"
for ptx in compute_75.ptx compute_80.ptx; do
    cmp "$made/$ptx" "$kernels/$ptx" || { echo "$kernels/$ptx does not belong to the sources: run scripts/ptx.sh" >&2; exit 1; }
done
$make assemble "$tools" "$kernels" $verbose
