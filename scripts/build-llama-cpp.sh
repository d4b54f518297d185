#!/usr/bin/env bash
# Builds llama.cpp's command-line tools for the CPU, to race against (scripts/race.sh) and to check our GGUF files with
# (scripts/check-gguf.sh). The source comes from a source package of llama-cpp-python on PyPI, which holds the whole tree.
#
#   scripts/build-llama-cpp.sh [DEST] [CMAKE_FLAG...]
#
# The tools lie in DEST/bin (default target/llama.cpp/bin). Native by default; for a machine without AVX-512:
#   scripts/build-llama-cpp.sh target/llama.cpp-avx2 -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
# Takes about ten minutes on two cores; needs python3 with venv, a C++ compiler and PyPI.
set -euo pipefail
version=0.3.36
dest=$(realpath -m "${1:-$(dirname "$0")/../target/llama.cpp}")
shift || true
mkdir -p "$dest" && cd "$dest"
[ -x venv/bin/cmake ] || { python3 -m venv venv && venv/bin/pip -q install cmake ninja; }
package=llama_cpp_python-$version
[ -f "$package.tar.gz" ] || venv/bin/pip -q download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$version" -d .
[ -d "$package" ] || tar xzf "$package.tar.gz"
# The intrinsic of GCC 12 does not say that it reads the whole configuration of AMX, so stores to it are dropped, and the
# tools end with a segmentation fault on processors with AMX.
sed -i 's/^    _tile_loadconfig(&tc);/    __asm__ volatile("" : : "r"(\&tc) : "memory"); _tile_loadconfig(\&tc);/' \
  "$package/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
export PATH="$dest/venv/bin:$PATH"
cmake -S "$package/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  "$@" > configure.log
ninja -C build llama-bench llama-batched-bench llama-quantize llama-completion llama-server > build.log
mkdir -p bin
cp build/bin/llama-{bench,batched-bench,quantize,completion,server} bin/
echo "$dest/bin"
