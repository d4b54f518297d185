#!/usr/bin/env bash
# Measures `iec dedup` beside zstd and the Python package zipnn, on the same bytes, one thread each, in memory:
#   scripts/dedup-bench.sh PACK...            packs whose model.ie.bin is there
# Needs zstd and a Python with zipnn (`python3 -m venv V && V/bin/pip install zipnn`, then PYTHON=V/bin/python); either may be missing.
# SAMPLE=256M is what zstd -3 and zipnn see of a pack, SLOW_SAMPLE=16M what zstd -19 sees: the bytes in the middle of model.ie.bin.
# IEC=target/release/iec is the binary. Prints a table; GB are 10^9 bytes of weights.
set -euo pipefail
iec=${IEC:-target/release/iec}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

row() { printf '%-20s %-10s %8s %9s %9s\n' "$@"; }

# Bytes in the middle of a file, from a multiple of 4096 on: at most $2 of them.
middle() {
    local size wanted
    size=$(stat -c %s "$1") wanted=$(numfmt --from=iec "$2")
    local skip=$((size > wanted ? (size - wanted) / 8192 : 0))
    dd if="$1" of="$3" bs=4096 skip="$skip" count=$(((wanted + 4095) / 4096)) status=none
}

# Ratio and speeds of zstd's own benchmark: "-3  15659856 (1.277) 498.14 MB/s 1542.5 MB/s  FILE".
bench_zstd() {
    zstd -b"$1" -e"$1" -i1 -T1 -q "$2" 2>&1 | awk -v size="$(stat -c %s "$2")" '
        / MB\/s / { printf "%.4f %.3f %.2f\n", $2 / size, $4 / 1000, $6 / 1000 }'
}

bench_zipnn() {
    "$python" - "$1" "$2" <<'PY'
import sys, time
from zipnn import ZipNN
data, dtype = open(sys.argv[1], "rb").read(), {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}.get(sys.argv[2])
if dtype is None:  # it knows floats only
    sys.exit(0)
coder = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
encode = decode = float("inf")
for _ in range(3):
    start = time.perf_counter(); small = coder.compress(bytearray(data)); encode = min(encode, time.perf_counter() - start)
    start = time.perf_counter(); back = coder.decompress(small); decode = min(decode, time.perf_counter() - start)
assert bytes(back) == data
print(f"{len(small) / len(data):.4f} {len(data) / 1e9 / encode:.2f} {len(data) / 1e9 / decode:.2f}")
PY
}

row pack program ratio 'enc GB/s' 'dec GB/s'
for pack in "$@"; do
    name=$(basename "$pack")
    for codec in auto zstd; do
        json=$("$iec" dedup --quiet --json --dry-run --threads 1 --codec "$codec" --model-dir "$pack")
        # One row for each kind of tensor that is a tenth of the pack or more.
        while read -r kind ratio encode decode; do
            row "$name $kind" "iec $codec" "$ratio" "$encode" "$decode"
            dtype=$kind
        done < <("$python" -c 'import json, sys
kinds = json.loads(sys.argv[1])["kinds"]
total = kinds.pop()["original_bytes"]
for kind in sorted(kinds, key=lambda kind: kind["original_bytes"]):
    if kind["original_bytes"] * 10 >= total:
        print("{kind} {ratio:.4f} {encode_gb_per_s:.2f} {decode_gb_per_s:.2f}".format(**kind))' "$json")
    done
    middle "$pack/model.ie.bin" "${SAMPLE:-256M}" "$work/sample"
    middle "$pack/model.ie.bin" "${SLOW_SAMPLE:-16M}" "$work/slow"
    if command -v zstd >/dev/null; then
        for level in 3 19; do
            read -r ratio encode decode <<<"$(bench_zstd "$level" "$work/$([ "$level" = 3 ] && echo sample || echo slow)")"
            row "$name" "zstd -$level" "$ratio" "$encode" "$decode"
        done
    fi
    if "$python" -c 'import zipnn' 2>/dev/null; then
        fields=$(bench_zipnn "$work/sample" "$dtype" 2>/dev/null)
        if [ -n "$fields" ]; then
            read -r ratio encode decode <<<"$fields"
            row "$name" zipnn "$ratio" "$encode" "$decode"
        fi
    fi
done
