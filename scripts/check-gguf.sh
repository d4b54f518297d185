#!/usr/bin/env bash
# Does llama.cpp compute from our GGUF files what we compute? Exports the fixtures and compares token by token.
#
#   LLAMA_CPP=DIR [IEC=target/release/iec] scripts/check-gguf.sh [FIXTURE...]
#
# DIR holds llama-completion (a build's bin directory). Needs python3 (its standard library only) to put tokens into the
# words that llama-completion prints. Every fixture is compared in three forms, greedily, three prompts of 24 tokens:
#
#   floats    all matrices as f32, both with f32 activations: every token must be the same
#   q4 as f32 our q4_0 (or MXFP4) weights written out as f32, and imported again for us: every token must be the same
#   q4        the same weights as they are stored, both with activations rounded to 8 bits: not at the same places, so
#             random weights may part ways; how many tokens agree is shown, not judged
#
# and the prompt must be cut into the same tokens. Fixtures are changed where llama.cpp has no equal: gpt-oss gets YaRN with
# whole bounds (`truncate`), Gemma 2 the usual scale of scores; texts stay within the window of Mistral and Phi-3.
set -euo pipefail
cd "$(dirname "$0")/.."
llama=${LLAMA_CPP:?set LLAMA_CPP to the directory of llama-completion}/llama-completion
iec=${IEC:-target/release/iec}
[ -x "$llama" ] || { echo "no llama-completion in $LLAMA_CPP" >&2; exit 1; }
[ -x "$iec" ] || { echo "no $iec: build it with cargo build --release, or set IEC" >&2; exit 1; }
if [ $# -eq 0 ]; then
  set -- stories260k llama-gqa llama3-rope-tied dedup-llama gptoss-bf16 gptoss-mxfp4 gptoss-trained mistral-swa mixtral \
         qwen2 qwen3 qwen3moe gemma2 gemma3 phi3
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prompts=("The quick brown fox" "Once upon a time" "In 1905 it's said")
failed=0

# Tokens that agree from the start: compare FILE.gguf PACK PRECISION TOKENS -> "prompts-alike tokens-alike tokens"
compare() {
  local alike=0 same=0 all=0
  for prompt in "${prompts[@]}"; do
    # It writes from a thread of its own and may end before that thread does; the whole output ends with an empty line.
    for _ in {1..50}; do
      "$llama" -m "$1" -p "$prompt" -n "$4" --temp 0 --top-k 1 -no-cnv -fa off -ctk f32 -ctv f32 -c 512 -t 1 --no-warmup \
        --no-display-prompt --simple-io --verbose-prompt > "$work/theirs" 2> "$work/log" < /dev/null \
        || { cat "$work/log" >&2; exit 1; }
      [ "$(tail -c 2 "$work/theirs" | od -An -tx1)" = " 0a 0a" ] && grep -q "total time" "$work/log" && break
    done
    "$iec" run -q --model-dir "$2" --prompt "$prompt" --max-new "$4" --greedy --precision "$3" --trace-ids "$work/ours" > /dev/null
    "$iec" inspect --json "$1" > "$work/inspect"
    read -r a s n < <(python3 - "$work" <<'PY'
import json, re, sys
work = sys.argv[1]
meta = json.load(open(f"{work}/inspect"))["metadata"]
tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
lines = [json.loads(line) for line in open(f"{work}/ours")]
ours = [line["next_id"] for line in lines if line["kind"] == "gen_step"]
prompt = next(line["prompt_token_ids"] for line in lines if line["kind"] == "prompt")
log = open(f"{work}/log", errors="replace").read()
theirs_prompt = [int(n) for n in re.findall(r"(\d+) -> '", log)]
# GPT-2's letters for bytes.
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
letters = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}
def piece(i):
    text = tokens[i]
    if kinds[i] == 5 or kinds[i] == 3 and text not in ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"):
        return b""
    if meta["tokenizer.ggml.model"] == "llama":
        return bytes([int(text[3:5], 16)]) if kinds[i] == 6 else text.replace("\u2581", " ").encode()
    return bytes(letters[c] for c in text) if kinds[i] == 1 else text.encode()
theirs = open(f"{work}/theirs", "rb").read()
same, text = 0, b""
for i in ours:
    text += piece(i).split(b"\0")[0]  # it prints C strings
    if not theirs.startswith(text):
        break
    same += 1
ended = "[end of text]" in log or b"[end of text]" in theirs
if ended and same < len(ours) and theirs.split(b" [end of text]")[0].rstrip(b"\n") == b"".join(map(piece, ours[:same])).rstrip(b"\n"):
    same = len(ours)  # llama.cpp knows more tokens that end a text, by their names
print(int(prompt == theirs_prompt), same, len(ours))
PY
)
    alike=$((alike + a)) same=$((same + s)) all=$((all + n))
  done
  echo "$alike $same $all"
}

printf '%-18s %8s %9s %10s %9s\n' fixture prompts floats "q4 as f32" q4
for name in "$@"; do
  source=tests/fixtures/$name
  [ -d "$source" ] || source=assets/$name
  hf=$work/$name tokens=24
  mkdir "$hf" && cp -r "$source"/. "$hf"
  case $name in
    gptoss*) sed -i 's/"truncate": false/"truncate": true/' "$hf/config.json" ;;
    gemma2) sed -i 's/"query_pre_attn_scalar": 20/"query_pre_attn_scalar": 24/' "$hf/config.json" ;;
    mistral-swa | phi3) tokens=8 ;;
  esac
  "$iec" pack -q --hf-dir "$hf" --out-dir "$work/pack" --overwrite
  "$iec" export-gguf -q --model-dir "$work/pack" --out "$work/float.gguf" --dtype f32 --dequantize=all --overwrite
  read -r alike same all < <(compare "$work/float.gguf" "$work/pack" fp32 "$tokens")
  # Rows that do not divide into blocks of 32 stay floats, as llama.cpp's own quantizer keeps them.
  odd=$("$iec" inspect --json --tensors "$work/pack" | python3 -c '
import json, sys
odd = [t["name"].replace(".", "\\.") for t in json.load(sys.stdin)["tensors"] if t["shape"][-1] % 32]
print("|".join(odd) or "^$")')
  "$iec" ptq -q --hf-dir "$hf" --out "$work/q4.json" --bits 4 --exclude "^($odd)\$" --force
  "$iec" pack -q --hf-dir "$hf" --out-dir "$work/q4" --q4-map "$work/q4.json" --overwrite
  "$iec" export-gguf -q --model-dir "$work/q4" --out "$work/q4f.gguf" --dtype f32 --dequantize=all --overwrite
  "$iec" export-gguf -q --model-dir "$work/q4" --out "$work/q4.gguf" --dtype f32 --overwrite
  "$iec" import-gguf -q "$work/q4f.gguf" --out-dir "$work/q4f" --overwrite
  case $name in gptoss*) sed -i 's/"truncate": false/"truncate": true/' "$work/q4f/model.ie.json" ;; esac
  read -r alike_q same_q all_q < <(compare "$work/q4f.gguf" "$work/q4f" fp32 "$tokens")
  read -r _ same_s all_s < <(compare "$work/q4.gguf" "$work/q4" int4 "$tokens")
  printf '%-18s %8s %9s %10s %9s\n' "$name" "$alike/${#prompts[@]}" "$same/$all" "$same_q/$all_q" "$same_s/$all_s"
  [ "$alike $same $alike_q $same_q" = "${#prompts[@]} $all ${#prompts[@]} $all_q" ] || failed=1
  rm -rf "$work"/*
done
[ $failed = 0 ] || echo "not everything agrees" >&2
exit $failed
