#!/usr/bin/env bash
# What does each recipe lose? Makes packs of a checkpoint by recipe, lets each read a text beside the float model, and prints a table.
#
#   scripts/quality.sh CHECKPOINT CALIBRATION_TEXT HELDBACK_TEXT [RECIPE...]
#
# Without recipes all of the list below are made. `target-X` is a budget of X bits per weight, `bits-X` a recipe of manifests/.
# Environment:
#
#   IEC          the program [target/release/iec]
#   TOKENS       tokens of the calibration text that are read [80000]
#   ALONG        if set, each pack is also made with statistics along the quantized model (`iec calib --quantized`)
#   LLAMA_CPP    directory of llama-quantize, llama-imatrix and llama-perplexity: then llama.cpp's own quantizers are measured on the
#                same weights (exported as f32) by its own tool, which computes with int8 activations
#   IK_LLAMA_CPP the same for ik_llama.cpp
#
# All matrices are quantized; a recipe says what body, embedding and output matrix become. Weights are compared with 16-bit activations
# (int4w, int8w), which add nothing visible.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,16p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
model=$1 calibration=$2 text=$3
shift 3
iec=${IEC:-$(dirname "$0")/../target/release/iec}
[ -x "$iec" ] || { echo "no $iec: build it with cargo build --release, or set IEC" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# name | body | embedding | output matrix | further options of ptq
recipes=$(sed 's/ *| */|/g' <<'TABLE'
q4_0-search   | q4_0 | q4_0 | q4_0 | --method=search
q4_0          | q4_0 | q4_0 | q4_0 |
q4_0-int5     | q4_0 | q4_0 | int5 |
q4_0-int6     | q4_0 | q4_0 | int6 |
q4_0-int8     | q4_0 | q4_0 | int8 |
q4_0-int6-int6 | q4_0 | int6 | int6 |
affine32      | int4a | int4a | int4a |
nl4-search    | nl4  | nl4  | nl4  | --method=search
nl4           | nl4  | nl4  | nl4  |
nl4-int5      | nl4  | nl4  | int5 |
nl4-int6      | nl4  | nl4  | int6 |
nl4-int5-int5 | nl4  | int5 | int5 |
nl4-int6-int6 | nl4  | int6 | int6 |
nl4-row       | nl4-row | nl4-row | nl4-row |
nl4-row-search | nl4-row | nl4-row | nl4-row | --method=search
nl4-row-int6  | nl4-row | nl4-row | int6-row |
nl4-row-int5-int6 | nl4-row | int5-row | int6-row |
int4-row      | int4-row | int4-row | int4-row |
int5-row      | int5-row | int5-row | int5-row |
int6-row      | int6-row | int6-row | int6-row |
int5          | int5 | int5 | int5 |
int6          | int6 | int6 | int6 |
int8          | int8 | int8 | int8 |
t3            | t3   | t3   | t3   |
t3-search     | t3   | t3   | t3   | --method=search
t3-32         | t3-32 | t3-32 | t3-32 |
t3-nl4-int6   | t3   | nl4-row | int6-row |
t3-32-nl4-int6 | t3-32 | nl4-row | int6-row |
t2-nl4-int6   | t2   | nl4-row | int6-row |
t2-32-nl4-int6 | t2-32 | nl4-row | int6-row |
TABLE
)

fields() {
  case $1 in
    int4a) echo '"scheme": "int4", "symmetric": false' ;;
    *-row) echo "\"scheme\": \"${1%-row}\", \"scale_dtype\": \"i8_row\"" ;;
    t[23]-32) echo "\"scheme\": \"${1%-32}\", \"group_size\": 32" ;;
    int8) echo '"scheme": "int8", "group_size": 32' ;;
    *) echo "\"scheme\": \"$1\"" ;;
  esac
}

# number NAME FILE: the first number called so in a line of JSON
number() { grep -o "\"$1\":[-0-9.e]*" "$2" | head -1 | cut -d: -f2; }

# row NAME PRECISION STATISTICS: packs the manifest and prints its row
row() {
  "$iec" pack -q --hf-dir "$model" --q4-map "$work/manifest.json" --calib "$3" --out-dir "$work/pack" --overwrite \
    --json > "$work/packed"
  "$iec" eval -q --model-dir "$work/pack" --precision "$2" --text "$text" --kl-ref "$work/float" --json > "$work/found"
  grep -o '"kl":{[^}]*}' "$work/found" > "$work/kl"
  local top
  top=$(grep -o '"top1_agreement":{[^}]*}' "$work/found" | grep -o '"value":[0-9.]*' | cut -d: -f2)
  printf '| %s | %.2f | %.6f | %.6f | %.2f %% |\n' "$1" "$(number bits_per_weight "$work/packed")" \
    "$(number mean "$work/kl")" "$(number stderr "$work/kl")" "$(bc <<< "100 * $top" 2> /dev/null || echo 0)"
}

# measure NAME PRECISION: the row of the manifest, and with ALONG a second one
measure() {
  row "$1" "$2" "$work/calib"
  [ -n "${ALONG:-}" ] || return 0
  "$iec" calib -q --hf-dir "$model" --text "$calibration" --max-tokens "${TOKENS:-80000}" --quantized "$work/manifest.json" \
    --out "$work/along" --overwrite
  row "$1, along" "$2" "$work/along"
}

"$iec" pack -q --hf-dir "$model" --out-dir "$work/float"
"$iec" calib -q --hf-dir "$model" --text "$calibration" --max-tokens "${TOKENS:-80000}" --hessian --out "$work/calib"
echo "| recipe | bits per weight | mean KL divergence | ± | same most likely token |"
echo "|---|---|---|---|---|"
while IFS='|' read -r name body embedding head options; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  cat > "$work/rules.json" <<RULES
{"version": 1, "rules": [{"include": "lm_head", $(fields "$head")}, {"include": "embed_tokens", $(fields "$embedding")},
 {"exclude": "router"}, {"include": "_proj", $(fields "$body")}]}
RULES
  if [ -n "$options" ]; then sed -i "s/\"scheme\"/\"method\": \"${options#--method=}\", \"scheme\"/g" "$work/rules.json"; fi
  "$iec" ptq -q --hf-dir "$model" --rules "$work/rules.json" --calib "$work/calib" --out "$work/manifest.json" --force --overwrite --fresh
  precision=int4w
  [[ $body == int[568]* ]] && precision=int8w
  measure "$name" "$precision"
done <<< "$recipes"
for name in "$@"; do
  case $name in
    target-*) how=(--target-bpw "${name#target-}" --plan-text "$calibration") ;;
    bits-*) how=(--rules "$(dirname "$0")/../manifests/$name.json") ;;
    *) continue ;;
  esac
  "$iec" ptq -q --hf-dir "$model" "${how[@]}" --calib "$work/calib" --out "$work/manifest.json" --force --overwrite
  measure "$name" int4w
done

[ -n "${LLAMA_CPP:-}${IK_LLAMA_CPP:-}" ] || exit 0
threads=$(nproc)
# llama-quantize takes floats only, so experts in MXFP4 are handed over as what they decode to, and it is told to give them that type again.
"$iec" export-gguf -q --model-dir "$work/float" --out "$work/float.gguf" --dtype f32 --dequantize all
experts=()
if grep -q mxfp4 "$model/config.json"; then experts=(--tensor-type ffn_.*_exps=mxfp4); fi

# peer LABEL BIN TYPE...: rows of the types of a llama.cpp; `+i` means with its importance matrix.
peer() {
  local label=$1 bin=$2
  shift 2
  "$bin/llama-perplexity" -m "$work/float.gguf" -f "$text" -c 512 -t "$threads" --kl-divergence-base "$work/base" &> "$work/log"
  "$bin/llama-imatrix" -m "$work/float.gguf" -f "$calibration" -o "$work/imatrix" -c 512 -t "$threads" &> "$work/log"
  for type in "$@"; do
    with=("${experts[@]}")
    [[ $type == *+i ]] && with+=(--imatrix "$work/imatrix")
    "$bin/llama-quantize" "${with[@]}" "$work/float.gguf" "$work/q.gguf" "${type%+i}" "$threads" &> "$work/log" \
      || { echo "$label: llama-quantize to $type:" >&2; tail -3 "$work/log" >&2; continue; }
    # ik_llama.cpp tells the sizes alone; the model has 32 bits per weight.
    bits=$(awk '/model size/ { all = $(NF - 1) } /quant size/ { now = $(NF - 1) } / BPW/ { bits = $(NF - 1) }
      END { sub(/.*\(/, "", bits); print bits ? bits : sprintf("%.2f", 32 * now / all) }' "$work/log")
    # It ends without its last lines now and then.
    for try in 1 2 3; do
      "$bin/llama-perplexity" -m "$work/q.gguf" -f "$text" -c 512 -t "$threads" --kl-divergence-base "$work/base" \
        --kl-divergence &> "$work/log"
      if grep -q 'Mean  *KLD' "$work/log" && grep -q 'Same top p:' "$work/log"; then break; fi
      [ "$try" -lt 3 ] || echo "$label: llama-perplexity with $type: no result" >&2
    done
    kl=$(grep 'Mean  *KLD' "$work/log" | grep -o '[0-9.]* ±.*' | sed 's/ ± */ | /' || echo '- | -')
    top=$(grep -o 'Same top p: *[0-9.]*' "$work/log" | grep -o '[0-9.]*$' || echo '-')
    echo "| $label ${type/+i/ + imatrix} | $bits | $kl | $top % |"
  done
}

if [ -n "${LLAMA_CPP:-}" ]; then
  peer llama.cpp "$LLAMA_CPP" q4_0 q4_0+i iq4_nl iq4_nl+i q4_K_S q4_K_S+i q4_K_M+i q5_K_M q8_0 iq4_xs+i q3_K_M+i iq3_m+i iq3_s+i iq2_m+i
fi
if [ -n "${IK_LLAMA_CPP:-}" ]; then
  peer ik_llama.cpp "$IK_LLAMA_CPP" iq4_ks+i iq4_k+i iq3_ks+i iq3_kt+i iq3_k+i iq2_kl+i iq2_kt+i
fi
