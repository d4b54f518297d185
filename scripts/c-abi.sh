#!/usr/bin/env bash
# Tests the C interface: builds libiec.so and libiec.a, compiles the examples and a program that calls every function,
# and runs them, also under AddressSanitizer and valgrind; runs a program that was compiled with the first header.
#
#   scripts/c-abi.sh [PROFILE]    release by default
#
# Exits with 3 where a C compiler, a C++ compiler or valgrind is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-release}
for tool in cc c++ valgrind nm; do
    command -v "$tool" >/dev/null || { echo "$tool is missing" >&2; exit 3; }
done

cargo build --quiet --locked --manifest-path crates/capi/Cargo.toml --profile "$profile"
target=${CARGO_TARGET_DIR:-target}/$([ "$profile" = dev ] && echo debug || echo "$profile")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$target/libiec.so" "$work/libiec.so.1"
ln -s libiec.so.1 "$work/libiec.so"
export LD_LIBRARY_PATH=$work

other=$(nm -D --defined-only "$work/libiec.so" | awk '{ print $NF }' | grep -v '^iec_' || true)
[ -z "$other" ] || { echo "exported, but not of the interface: $other" >&2; exit 1; }

capi=crates/capi
c=(cc -std=c11 -Wall -Wextra -Werror -O1 -g -I"$capi/include")
shared=(-L"$work" -liec -lpthread -lm)
"${c[@]}" "$capi/tests/abi.c" -o "$work/abi" "${shared[@]}"
"${c[@]}" -fsanitize=address "$capi/tests/abi.c" -o "$work/abi-asan" "${shared[@]}"
"${c[@]}" "$capi/examples/generate.c" -o "$work/generate" "${shared[@]}"
"${c[@]}" "$capi/examples/generate.c" -o "$work/generate-static" "$target/libiec.a" -lpthread -lm -ldl
c++ -std=c++17 -Wall -Wextra -Werror -I"$capi/include" "$capi/examples/chat.cpp" -o "$work/chat" "${shared[@]}"

echo "abi"
"$work/abi" 200 8 assets/stories260k
echo "abi under AddressSanitizer"
"$work/abi-asan" 5 8 assets/stories260k
echo "abi under valgrind"
# Optimized code computes on values that it drops later, which valgrind would report as undefined.
valgrind --quiet --undef-value-errors=no --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite "$work/abi" 2 2

expect() {
    local found
    found=$("$@")
    case "$found" in
    ", there was a little girl named Lily."*) ;;
    *) echo "$*: found '$found'" >&2; exit 1 ;;
    esac
}
expect "$work/generate"
expect "$work/generate-static"
chat() { echo "Once upon a time" | "$work/chat"; }
expect chat
# Programs that were compiled with earlier headers go on to work.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
    expect "$capi/tests/abi-1/generate"
fi
echo "the C interface is as its header says"
