#!/usr/bin/env bash
# Checks a build on a machine with an NVIDIA GPU, and measures it: kernels against the CPU, golden tokens, speed.
# Usage: scripts/gpu-check.sh IEC_BINARY [FIXTURES]
#        scripts/gpu-check.sh --unpack FIXTURES OUT_DIR
#   IEC_BINARY   the program to check
#   FIXTURES     tests/fixtures of the repository, or a directory of --unpack; golden tokens are skipped without
#   --unpack     copies the fixtures with the compressed ones unpacked, for a machine without the program zstd
# Needs nothing but the driver and a shell, no network, and less than 8 minutes. DEVICE=cuda:1 takes another GPU; TMPDIR needs 3 GB, or
# 25 GB for the larger measurement; KEEP=1 keeps the files. SIMULATED=libasan.so, for .ci/run: the driver is that of tests/cuda, nothing
# is measured. Exit code 1 if anything failed.
set -uo pipefail
usage() { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }

# Prints the directories of the fixtures, with plain or with compressed files.
fixtures_of() {
    local dir
    for dir in "$1"/*/ "$1"/families/*/; do
        if [ -f "$dir/config.json" ] && { [ -f "$dir/golden.json" ] || [ -f "$dir/golden.json.zst" ]; }; then echo "${dir%/}"; fi
    done
}

# Copies a fixture, and unpacks what is compressed.
unpack() { mkdir -p "$2" && cp "$1"/* "$2" && { [ ! -f "$2/golden.json.zst" ] || zstd -dqf --rm "$2"/*.zst; }; }

if [ "${1:-}" = --unpack ]; then
    [ $# = 3 ] || usage
    fixtures_of "$2" | while IFS= read -r dir; do unpack "$dir" "$3/$(basename "$dir")" || exit; done
    exit
fi
[ $# = 1 ] || [ $# = 2 ] || usage

iec=$(realpath "$1")
fixtures=${2:-}
[[ $("$iec" --version 2>/dev/null) = "iec "* ]] || { echo "$1: does not answer --version as iec does" >&2; exit 2; }
device=${DEVICE:-cuda}
work=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX")
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
limit_s=460
[ -z "${SIMULATED:-}" ] || limit_s=3600
failed=0
rows=()

left_s() { echo $((limit_s - SECONDS)); }

# note NAME RESULT SECONDS DETAIL
note() {
    rows+=("$(printf '%-30s %-8s %5s  %s' "$1" "$2" "$3" "$4")")
    echo "${rows[-1]}" >&2
    [ "$2" != FAILED ] || failed=1
}

# What the program is asked within `try`, which says how long it may take.
ask() {
    if [ -n "${SIMULATED:-}" ]; then
        LD_PRELOAD=$SIMULATED ASAN_OPTIONS=detect_leaks=0 IEC_SIM_STRICT=1 timeout -k 5 "$most_s" "$iec" "$@"
    else
        timeout -k 5 "$most_s" "$iec" "$@"
    fi
}

# try NAME MOST_SECONDS FUNCTION...: the last line it prints is the detail, and more is shown if it fails.
try() {
    local name=$1 most_s=$2 began=$SECONDS log status
    [ -z "${SIMULATED:-}" ] || most_s=1200
    shift 2
    log=$work/$(tr -c 'A-Za-z0-9\n' _ <<<"$name").log
    if [ "$(left_s)" -lt 5 ]; then
        note "$name" skipped 0 "no time left"
        return 1
    fi
    [ "$most_s" -lt "$(left_s)" ] || most_s=$(left_s)
    if "$@" >"$log" 2>&1; then
        note "$name" ok $((SECONDS - began)) "$(tail -n 1 "$log" | cut -c -100)"
    else
        status=$?
        [ $status = 124 ] && status="124, after $most_s s"
        note "$name" FAILED $((SECONDS - began)) "status $status: $*"
        tail -n 15 "$log" | cut -c -300 | sed 's/^/    /' >&2
        return 1
    fi
}

check_kernels() {
    ask devices --check ${SIMULATED:+--quick} --json >"$work/devices.json" || { status=$?; cat "$work/devices.json"; return $status; }
    echo "each kernel against the CPU"
}

# A fixture's prompts and tokens as they come in golden.json, one prompt per line: text, prompt ids, token ids.
golden_lines() {
    grep -oE '"text":"([^"\\]|\\.)*","ids":\[[0-9,]*\],"greedy_ids":\[[0-9,]*\]' "$1/golden.json"
}

# prompt step id, one step per line.
golden_steps() {
    golden_lines "$1" | sed -E 's/.*"greedy_ids":\[([0-9,]*)\]$/\1/' | awk -F, '{ for (i = 1; i <= NF; i++) print NR - 1, i - 1, $i }'
}

generated_steps() {
    sed -nE 's/^(.*"kind":"gen_step".*)$/\1/p' "$1" | awk '{
        n = split("prompt_index step next_id", keys, " ")
        for (i = 1; i <= n; i++) {
            match($0, "\"" keys[i] "\":[0-9]+")
            printf "%s%s", substr($0, RSTART + length(keys[i]) + 3, RLENGTH - length(keys[i]) - 3), i < n ? " " : "\n"
        }
    }' | sort -n -k 1,1 -k 2,2
}

generate() {
    local pack=$1 trace=$2
    shift 2
    ask run -q --model-dir "$pack" --precision fp32 --speculate off --ignore-eos --prompts-file "$pack/prompts.jsonl" --trace-ids "$trace" "$@" >/dev/null
}

check_fixture() {
    local dir=$1 pack steps most batch
    if [ -f "$dir/golden.json.zst" ]; then
        unpack "$dir" "$work/unpacked/$(basename "$dir")" || return
        dir=$work/unpacked/$(basename "$dir")
    fi
    pack=$work/$(basename "$dir")
    ask pack -q --hf-dir "$dir" --out-dir "$pack" --overwrite || return
    golden_steps "$dir" >"$pack/golden"
    golden_lines "$dir" | sed -E 's/^"text":(".*"),"ids":.*/{"prompt":\1}/' >"$pack/prompts.jsonl"
    steps=$(awk 'END { print NR }' "$pack/golden")
    [ "$steps" -gt 0 ] || { echo "no golden tokens in $dir"; return 1; }
    most=$(awk '$2 >= most { most = $2 + 1 } END { print most }' "$pack/golden")
    for batch in 1 3; do
        generate "$pack" "$pack/cuda-$batch.jsonl" --device "$device" --max-new "$most" --batch "$batch" || return
        generated_steps "$pack/cuda-$batch.jsonl" >"$pack/generated"
        diff "$pack/golden" "$pack/generated" || { echo "batch $batch: tokens differ from golden.json"; return 1; }
    done
    # The logits, too: what the CPU said step by step, the GPU must say of whole texts.
    generate "$pack" "$pack/cpu.jsonl" --device cpu --max-new "$most" || return
    ask verify -q --model-dir "$pack" --device "$device" --precision fp32 --trace "$pack/cpu.jsonl" || return
    echo "$steps tokens as golden.json has them, one by one, in batches and read at once"
}

sanitize() {
    timeout -k 5 "$most_s" compute-sanitizer --tool "$1" --error-exitcode 9 \
        "$iec" run --model-dir "$2" --device "$device" --prompt 'Once upon a time' --max-new 4 && echo "no complaint"
}

number() { sed -nE "s/.*\"$2\":([0-9.]+).*/\1/p" "$1" | head -n 1; }

make_pack() {
    cat >"$work/rules.json" <<'RULES'
{"version": 1, "defaults": {"scheme": "q4_0"}, "rules": [
  {"include": "^lm_head\\.weight$", "scheme": "int8", "group_size": 32},
  {"include": "^model\\.layers\\.\\d+\\.(self_attn\\.[qkvo]|mlp\\.(gate|up|down))_proj\\.weight$"}]}
RULES
    ask synth -q --like "$1" --out-dir "$work/checkpoint" --overwrite &&
        ask pack -q --hf-dir "$work/checkpoint" --out-dir "$work/$1" --q4-map "$work/rules.json" --overwrite &&
        rm -r "$work/checkpoint" && echo "$(du -m "$work/$1/model.ie.bin" | cut -f 1) MB"
}

measure() {
    local model=$1 batch=$2 prompt=$3 out
    out=$work/$model-$batch.json
    ask bench -q --model-dir "$work/$model" --device "$device" --batch "$batch" --prompt-len "$prompt" --max-new 128 >"$out" || return
    grep -q '"device":"cuda' "$out" || { cat "$out"; echo "not measured on the GPU"; return 1; }
    printf 'prefill %.0f tokens/s, decode %.1f tokens/s, %.0f GB/s\n' "$(number "$out" tps_prefill)" "$(number "$out" tps_decode)" \
        "$(number "$out" effective_bandwidth_gbps)"
}

# model, GB of disk and of memory that it needs
performance() {
    local model=$1 disk=$2 memory=$3 free_disk free_memory
    free_disk=$(df -Pk "$work" | awk 'NR == 2 { print int($4 / 1e6) }')
    free_memory=$(awk '/MemAvailable/ { print int($2 / 1e6) }' /proc/meminfo)
    if [ "$free_disk" -lt "$disk" ] || [ "$free_memory" -lt "$memory" ]; then
        note "$model" skipped 0 "$disk GB of disk and $memory GB of memory are needed, $free_disk and $free_memory are free"
        return
    fi
    try "$model int4: pack" 200 make_pack "$model" || return
    try "$model int4: 1 text" 60 measure "$model" 1 1024
    try "$model int4: 16 texts" 60 measure "$model" 16 256
    rm -rf "${work:?}/$model"
}

main() {
    local gpu dir first=''
    gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.memory,pstate --format=csv,noheader 2>/dev/null) || gpu="nvidia-smi does not answer"
    while IFS= read -r line; do note nvidia-smi - 0 "$line"; done <<<"$gpu"
    note binary - 0 "$("$iec" --version), $(sha256sum "$iec" | cut -c -16)"
    try "devices --check" 150 check_kernels
    while IFS= read -r dir; do
        if [ -f "$dir/golden.json.zst" ] && ! command -v zstd >/dev/null; then
            note "$(basename "$dir")" skipped 0 "its files are compressed, and zstd is missing; see --unpack"
            continue
        fi
        try "$(basename "$dir")" 40 check_fixture "$dir" </dev/null && first=${first:-$work/$(basename "$dir")}
    done < <(fixtures_of "${fixtures:-/nonexistent}")
    [ -n "$fixtures" ] || note "golden tokens" skipped 0 "no FIXTURES given"
    if [ -n "$first" ] && command -v compute-sanitizer >/dev/null; then
        try "compute-sanitizer memcheck" 60 sanitize memcheck "$first"
        try "compute-sanitizer racecheck" 60 sanitize racecheck "$first"
    else
        note compute-sanitizer skipped 0 "not installed, or no fixture to run"
    fi
    if [ -z "${SIMULATED:-}" ]; then
        performance tinyllama-1.1b 4 4
        performance llama-3.1-8b 25 12
    fi
    printf '\n%-30s %-8s %5s\n' check result s
    printf '%s\n' "${rows[@]}"
    [ "$failed" = 0 ] && echo "all passed in $SECONDS s" || echo "FAILED; $SECONDS s"
    return "$failed"
}

main
