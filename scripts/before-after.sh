#!/usr/bin/env bash
# Is one build of iec as fast as another? Measures both in turn on the same packs and prints the ratios.
#
#   scripts/before-after.sh OLD NEW [--rounds N] [--threads N] [--models DIR] [ROW...]
#
#   OLD, NEW      two iec binaries
#   --rounds N    pairs of measurements per row (7); the order within a pair alternates
#   --threads N   threads of both (all cores)
#   --pairs FILE  file to which a line is added for each pair: row, unit, before, after
#   --models DIR  where the checkpoint and the packs lie or are made by OLD (target/race; 8 GB)
#   ROW           decode, prefill; the same with a scheme or precision before them, as in nl4-decode: g128, nl4, mxfp4, int8,
#                 int4w, bf16, fp16, fp32; batch-16; kv-TYPE for f16, bf16, int8, fp8, int4; pack, pack-as-is, start (all)
#
# The model has the shape of TinyLlama 1.1B with random weights; q4_0 unless the row says otherwise. g128 are 4 bits in
# groups of 128, and fp16 and fp32 compute from bf16 weights. The rows of mxfp4 have the shape of the first two layers of
# gpt-oss-20b. Those of kv decode after 1920 tokens, as the model takes 2048. Prints a Markdown table: the
# median of each build, and the median with the extremes of the ratios NEW/OLD taken within a pair, since the memory of shared
# machines is not equally fast in all minutes. Higher is better for tokens/s, lower for seconds.
set -euo pipefail

die() { echo "before-after.sh: $*" >&2; exit 2; }
[ $# -ge 2 ] && [ -x "$1" ] && [ -x "$2" ] || die "name two iec binaries; the head of this file explains the options"
old=$(realpath "$1") new=$(realpath "$2"); shift 2
all=(decode prefill batch-16 {g128,nl4,mxfp4,int8,int4w,bf16,fp16,fp32}-{decode,prefill} kv-{f16,bf16,int8,fp8,int4}
  pack pack-as-is start)
rounds=7 threads=$(nproc) models=$(dirname "$0")/../target/race pairs=/dev/null rows=()
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;; --threads) threads=$2; shift ;; --models) models=$2; shift ;;
    --pairs) pairs=$(realpath -m "$2"); shift ;;
    --*) die "unknown option $1" ;;
    *) [[ " ${all[*]} " = *" $1 "* ]] || die "unknown row $1; the rows: ${all[*]}"
       rows+=("$1") ;;
  esac
  shift
done
[ ${#rows[@]} -gt 0 ] || rows=("${all[@]}")
mkdir -p "$models"
models=$(realpath "$models")

[ -d "$models/tinyllama" ] || "$old" synth --like tinyllama-1.1b --out-dir "$models/tinyllama"
[ -d "$models/tl-bf16" ] || "$old" pack --hf-dir "$models/tinyllama" --out-dir "$models/tl-bf16"
if [ ! -d "$models/tl-q4_0" ]; then
  "$old" ptq --hf-dir "$models/tinyllama" --bits 4 --out "$models/tl-q4_0.json"
  "$old" pack --hf-dir "$models/tinyllama" --q4-map "$models/tl-q4_0.json" --out-dir "$models/tl-q4_0"
fi
linear='^model\\.layers\\.\\d+\\..*_proj\\.weight$|^lm_head\\.weight$'
while read -r name rule; do
  [[ " ${rows[*]}" = *" $name-"* ]] && [ ! -d "$models/tl-$name" ] || continue
  echo '{"version": 1, "rules": [{"include": "'"$linear"'", "method": "rtn", '"$rule"'}]}' >"$models/tl-$name.json"
  "$old" pack --hf-dir "$models/tinyllama" --q4-map "$models/tl-$name.json" --out-dir "$models/tl-$name"
done <<'RULES'
g128 "scheme": "int4", "group_size": 128
nl4 "scheme": "nl4"
int8 "scheme": "int8", "group_size": "row"
RULES
if [[ " ${rows[*]}" = *" mxfp4-"* ]] && [ ! -d "$models/gpt-oss-2" ]; then
  "$old" synth --like gpt-oss-20b --layers 2 --out-dir "$models/gpt-oss-20b-2-hf"
  "$old" pack --hf-dir "$models/gpt-oss-20b-2-hf" --q4-map "$(dirname "$0")/../manifests/gpt-oss-20b.json" \
    --out-dir "$models/gpt-oss-2"
fi

# bench PROGRAM FIELD OPTION...: one figure of the JSON line of `iec bench`
bench() {
  local program=$1 field=$2; shift 2
  REPORT=0 "$program" bench --threads "$threads" --runs 1 --rounds 1 "$@" -q 2>/dev/null |
    sed -nE "s/^.*\"$field\":([0-9.e+-]+).*$/\1/p" | head -1
}
seconds() { local begin end; begin=$(date +%s.%N); "$@" >/dev/null 2>&1; end=$(date +%s.%N); echo "$end - $begin" | bc -l; }
packing() { # packing PROGRAM OPTION...
  local program=$1; shift
  rm -rf "$models/packed"
  seconds "$program" pack --threads "$threads" --hf-dir "$models/tinyllama" "$@" --out-dir "$models/packed" -q
  rm -rf "$models/packed"
}
measure() { # measure PROGRAM ROW
  local program=$1 pack=tl-q4_0 precision=int4 new=96
  case $2 in
    g128-* | nl4-*) pack=tl-${2%-*} ;;
    mxfp4-*) pack=gpt-oss-2 ;;
    int4w-*) precision=int4w ;;
    int8-*) pack=tl-int8 precision=int8 ;;
    bf16-* | fp16-* | fp32-*) pack=tl-bf16 precision=${2%-*} new=24 ;;
  esac
  local model="--model-dir $models/$pack --precision $precision"
  case $2 in
    *decode) bench "$program" tps_decode $model --batch 1 --prompts-file "$models/one.txt" --max-new $new --warmup 8 ;;
    *prefill) bench "$program" tps_prefill $model --prompt-len 512 --max-new 2 --warmup 2 ;;
    batch-16) bench "$program" tps_decode $model --batch 16 --prompt-len 64 --max-new 32 --warmup 2 ;;
    kv-*) bench "$program" tps_decode $model --kv "${2#kv-}" --depth 1920 --prompt-len 1 --max-new 65 ;;
    pack) packing "$program" --q4-map "$models/tl-q4_0.json" ;;
    pack-as-is) packing "$program" ;;
    start) seconds "$program" run --threads "$threads" $model --prompt "Once upon a time" --max-new 1 --ignore-eos -q ;;
  esac
}
echo "Once upon a time" >"$models/one.txt"
statistics() { sort -g | awk '{ v[NR] = $1 } END { m = NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2; print m, v[1], v[NR] }'; }

echo "| row | unit | before | after | after / before (least-most) |"
echo "|---|---|---|---|---|"
for row in "${rows[@]}"; do
  befores='' afters='' ratios=''
  case $row in pack* | start) unit=s ;; *) unit=tokens/s ;; esac
  measure "$old" "$row" >/dev/null
  for round in $(seq "$rounds"); do
    if [ $((round % 2)) = 1 ]; then a=$(measure "$old" "$row"); b=$(measure "$new" "$row")
    else b=$(measure "$new" "$row"); a=$(measure "$old" "$row"); fi
    [ -n "$a" ] && [ -n "$b" ] || die "$row: a build printed no figure"
    echo "$row $unit $a $b" >>"$pairs"
    befores+="$a"$'\n' afters+="$b"$'\n' ratios+="$(echo "$b / $a" | bc -l)"$'\n'
  done
  read -r before _ <<<"$(printf %s "$befores" | statistics)"
  read -r after _ <<<"$(printf %s "$afters" | statistics)"
  read -r ratio least most <<<"$(printf %s "$ratios" | statistics)"
  printf '| %s | %s | %.3g | %.3g | %.3f (%.3f-%.3f) |\n' "$row" "$unit" "$before" "$after" "$ratio" "$least" "$most"
done
