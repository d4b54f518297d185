#!/usr/bin/env bash
# Builds libcuda.so.1, the simulated driver of tests/cuda: LD_LIBRARY_PATH=OUT_DIR iec devices
# Usage: scripts/simulated-cuda.sh OUT_DIR
#   CXX=g++      the compiler
#   SANITIZE=1   with AddressSanitizer, for kernels that reach beyond memory; run programs with LD_PRELOAD=OUT_DIR/libasan.so
set -euo pipefail
[ $# = 1 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

cxx=${CXX:-g++}
flags=(-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -DIEC_EMULATED "-I$out" -Itests/cuda -Isrc/runtime/cuda/kernels)
# Misaligned access traps; emulator.cpp says where.
flags+=(-fsanitize=alignment -fsanitize-undefined-trap-on-error)
if [ "$(uname -m)" = x86_64 ]; then flags+=(-march=native); fi
if [ -n "${SANITIZE:-}" ]; then
    flags+=(-fsanitize=address)
    ln -sf "$("$cxx" -print-file-name=libasan.so)" "$out/libasan.so"
fi

kernels=src/runtime/cuda/kernels/kernels.cu
"$cxx" "${flags[@]}" -E -P -DKERNEL=IEC_ENTRY_POINT -x c++ "$kernels" | tr '\n' ' ' \
    | grep -oE 'IEC_ENTRY_POINT +[A-Za-z0-9_]+ *\(' | sed -E 's/IEC_ENTRY_POINT +([A-Za-z0-9_]+) *\(/ENTRY_POINT(\1)/' >"$out/entry_points.inc"

# Shared memory of kernels lies between two marks, so that it can be filled with garbage.
mark() { echo "unsigned char emulator_shared_$1[64] __attribute__((visibility(\"hidden\"), aligned(64)));" | "$cxx" -fPIC -x c -c - -o "$out/$1.o"; }
mark begin
mark end

pids=()
for name in entry_points emulator driver memory streams; do
    "$cxx" "${flags[@]}" $([ $name != entry_points ] || echo -w) -c "tests/cuda/$name.cpp" -o "$out/$name.o" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
"$cxx" "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 "$out"/{begin,entry_points,end,emulator,driver,memory,streams}.o \
    -o "$out/libcuda.so.1.new" -lpthread
mv "$out/libcuda.so.1.new" "$out/libcuda.so.1"
rm "$out"/*.o
echo "$out/libcuda.so.1: $(wc -l <"$out/entry_points.inc") kernels"
