#!/usr/bin/env bash
# Builds libcuda.so.1, the simulated driver of tests/cuda, unless it is there already: LD_LIBRARY_PATH=OUT_DIR iec devices
# Usage: scripts/simulated-cuda.sh OUT_DIR
#   CXX=g++      the compiler
#   SANITIZE=1   with AddressSanitizer, for kernels that reach beyond memory; run programs with LD_PRELOAD=OUT_DIR/libasan.so
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

cxx=${CXX:-g++}
# Misaligned access traps; emulator.cpp says where.
flags=(-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -fsanitize=alignment -fsanitize-undefined-trap-on-error
    -DIEC_EMULATED -Itests/cuda -Isrc/runtime/cuda/kernels)
if [ "$(uname -m)" = x86_64 ]; then flags+=(-march=native); fi
if [ -n "${SANITIZE:-}" ]; then flags+=(-fsanitize=address); fi
kernels=src/runtime/cuda/kernels
sources=(scripts/simulated-cuda.sh tests/cuda/*.h tests/cuda/*.cpp "$kernels"/*.cu "$kernels"/*.cuh)
made_from=$(echo "$cxx ${flags[*]}" | cat - "${sources[@]}" | sha256sum)
if [ -e "$out/libcuda.so.1" ] && [ "$(cat "$out/made-from" 2>/dev/null)" = "$made_from" ]; then exit; fi

new=$(mktemp -d "$out/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
# Every kernel is preceded by the word KERNEL.
"$cxx" "${flags[@]}" -E -P -DKERNEL=IEC_ENTRY_POINT -x c++ "$kernels/kernels.cu" | tr '\n' ' ' \
    | grep -oE 'IEC_ENTRY_POINT +[A-Za-z0-9_]+ *\(' | sed -E 's/IEC_ENTRY_POINT +([A-Za-z0-9_]+) *\(/ENTRY_POINT(\1)/' >"$new/entry_points.inc"

# Shared memory of kernels lies between two marks, so that it can be filled with garbage.
mark() {
    echo "unsigned char emulator_shared_$1[64] __attribute__((visibility(\"hidden\"), aligned(64)));" | "$cxx" -fPIC -x c -c - -o "$new/$1.o"
}
mark begin
mark end

pids=()
for name in entry_points emulator ptx operations driver memory streams; do
    "$cxx" "${flags[@]}" "-I$new" $([ $name != entry_points ] || echo -w) -c "tests/cuda/$name.cpp" -o "$new/$name.o" &
    pids+=($!)
done
failed=''
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
[ -z "$failed" ] || exit 1
"$cxx" "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 "$new"/{begin,entry_points,end,emulator,ptx,operations,driver,memory,streams}.o \
    -o "$new/libcuda.so.1" -lpthread -ldl
if [ -n "${SANITIZE:-}" ]; then ln -sf "$("$cxx" -print-file-name=libasan.so)" "$out/libasan.so"; fi
mv "$new/libcuda.so.1" "$out/libcuda.so.1"
echo "$made_from" >"$out/made-from"
echo "$out/libcuda.so.1: $(wc -l <"$new/entry_points.inc") kernels" >&2
