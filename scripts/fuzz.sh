#!/usr/bin/env bash
# Fuzzes one parser with libFuzzer, with the stable toolchain: scripts/fuzz.sh TARGET [libFuzzer options]
#   scripts/fuzz.sh safetensors -runs=10000000
#   scripts/fuzz.sh all -max_total_time=60
# IEC_FUZZ_FAST=1 does not record comparisons and indirect calls: docs/FUZZING.md says for which targets this is better.
# New inputs go to fuzz/target/found/TARGET, failures to fuzz/regressions/TARGET. Needs a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

target=${1:?name a target of fuzz/src/targets.rs, or all}
shift
host=$(rustc -vV | sed -n 's/^host: //p')
# What cargo-fuzz passes for coverage; none of it needs a nightly compiler.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Ccodegen-units=1 --cfg fuzzing"
if [ -n "${IEC_FUZZ_FAST:-}" ]; then
    build=target/fast
    RUSTFLAGS+=" -Cllvm-args=-sanitizer-coverage-level=3"
else
    build=target
    # libFuzzer learns the numbers and words that the program compares with its input, and its indirect calls.
    RUSTFLAGS+=" -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-trace-compares"
fi
cargo build --quiet --release --target "$host" --target-dir "$build"

fuzz() {
    local name=$1
    shift
    mkdir -p "target/found/$name" "regressions/$name"
    IEC_FUZZ_TARGET=$name "$build/$host/release/iec-fuzz" -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
        -dict="dict/words.dict" -artifact_prefix="regressions/$name/" "$@" \
        "target/found/$name" "corpus/$name" "regressions/$name"
}

if [ "$target" = all ]; then
    for dir in corpus/*/; do
        fuzz "$(basename "$dir")" "$@"
    done
else
    fuzz "$target" "$@"
fi
