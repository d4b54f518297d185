#!/usr/bin/env bash
# Does llama.cpp compute from our GGUF files what we compute? Exports the fixtures and compares token by token.
#
#   LLAMA_CPP=DIR [IEC=target/release/iec] scripts/check-gguf.sh [FIXTURE...]
#
# DIR holds llama-server (a build's bin directory). Needs python3 (its standard library only), perl, and zstd for the
# fixtures in tests/fixtures/families. Every fixture is compared in three forms, greedily, three prompts of 24 tokens:
#
#   floats    all matrices as f32, both with f32 activations: every token must be the same
#   q4 as f32 our q4_0 (or MXFP4) weights written out as f32, and imported again for us: every token must be the same
#   q4        the same weights as they are stored, both with activations rounded to 8 bits: not at the same places, so
#             random weights may part ways; how many tokens agree is shown, not judged
#
# llama.cpp gets our tokens of a prompt. It must cut the text into the same ones, too, except for GLM, before whose texts
# it adds no or one token in place of two. Fixtures are changed where llama.cpp has no equal: gpt-oss gets YaRN with whole
# bounds (`truncate`), Gemma 2 the usual scale of scores; texts stay within the window of Mistral and Phi-3. The table of
# fp16 values from which llama.cpp computes GELU changes tokens of gemma4 (`q4 as f32`); without GGML_GELU_FP16 it agrees.
set -euo pipefail
cd "$(dirname "$0")/.."
llama=${LLAMA_CPP:?set LLAMA_CPP to the directory of llama-server}/llama-server
iec=${IEC:-target/release/iec}
[ -x "$llama" ] || { echo "no llama-server in $LLAMA_CPP" >&2; exit 1; }
[ -x "$iec" ] || { echo "no $iec: build it with cargo build --release, or set IEC" >&2; exit 1; }
if [ $# -eq 0 ]; then
  set -- stories260k llama-gqa llama3-rope-tied dedup-llama gptoss-bf16 gptoss-mxfp4 gptoss-trained mistral-swa mixtral \
         qwen2 qwen3 qwen3moe gemma2 gemma3 phi3 $(ls tests/fixtures/families)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prompts=("The quick brown fox" "Once upon a time" "In 1905 it's said")
failed=0

# Tokens that agree from the start: compare FILE.gguf PACK PRECISION TOKENS -> "prompts-alike tokens-alike tokens"
compare() {
  rm -f "$work"/ours.*
  for i in "${!prompts[@]}"; do
    "$iec" run -q --model-dir "$2" --prompt "${prompts[i]}" --max-new "$4" --greedy --precision "$3" \
      --trace-ids "$work/ours.$i" > /dev/null
  done
  python3 - "$llama" "$1" "$work" "${prompts[@]}" <<'PY'
import json, socket, subprocess, sys, time, urllib.request

server, model, work, *prompts = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


log = open(f"{work}/log", "w")
command = [server, "-m", model, "--port", str(port), "-c", "512", "-t", "1", "-np", "1", "-fa", "off"]
process = subprocess.Popen(command + ["-ctk", "f32", "-ctv", "f32", "--no-warmup"], stdout=log, stderr=log)
try:
    while True:
        try:
            ask("health")
            break
        except OSError:
            if process.poll() is not None:
                sys.exit(open(f"{work}/log").read())
            time.sleep(0.05)
    alike = same = count = 0
    for i, prompt in enumerate(prompts):
        lines = [json.loads(line) for line in open(f"{work}/ours.{i}")]
        ids = next(line["prompt_token_ids"] for line in lines if line["kind"] == "prompt")
        ours = [line["next_id"] for line in lines if line["kind"] == "gen_step"]
        alike += ask("tokenize", {"content": prompt, "add_special": True})["tokens"] == ids
        body = {"prompt": ids, "n_predict": len(ours), "temperature": 0, "top_k": 1, "return_tokens": True}
        answer = ask("completion", body)
        theirs = answer["tokens"]
        equal = next((j for j, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        # llama.cpp does not return the token that ends a text, and knows more of these, by their names.
        if answer["stop_type"] == "eos" and equal == len(theirs):
            equal = len(ours)
        same, count = same + equal, count + len(ours)
    print(alike, same, count)
finally:
    process.kill()
    process.wait()
PY
}

printf '%-18s %8s %9s %10s %9s\n' fixture prompts floats "q4 as f32" q4
for name in "$@"; do
  for source in tests/fixtures/$name assets/$name tests/fixtures/families/$name; do [ ! -d "$source" ] || break; done
  hf=$work/$name tokens=24 texts=${#prompts[@]}
  mkdir "$hf" && cp -r "$source"/. "$hf"
  for file in "$hf"/*.zst; do [ ! -e "$file" ] || zstd -dq --rm "$file"; done
  case $name in
    gptoss*) sed -i 's/"truncate": false/"truncate": true/' "$hf/config.json" ;;
    gemma2) sed -i 's/"query_pre_attn_scalar": 20/"query_pre_attn_scalar": 24/' "$hf/config.json" ;;
    mistral-swa | phi3) tokens=8 ;;
    glm4*) texts=0 ;;
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
  # GGUF does not say that the bounds are whole; the description's hash, its last field, is removed with the change.
  case $name in
    gptoss*)
      perl -0pi -e 's/("truncate": *)false/$1true/; s/,\s*"sha256": *"\w{64}"(\s*}\s*)$/$1/' "$work/q4f/model.ie.json"
      ;;
  esac
  read -r alike_q same_q all_q < <(compare "$work/q4f.gguf" "$work/q4f" fp32 "$tokens")
  read -r _ same_s all_s < <(compare "$work/q4.gguf" "$work/q4" int4 "$tokens")
  printf '%-18s %8s %9s %10s %9s\n' "$name" "$alike/${#prompts[@]}" "$same/$all" "$same_q/$all_q" "$same_s/$all_s"
  [ "$alike $same $alike_q $same_q" = "$texts $all $texts $all_q" ] || failed=1
  rm -rf "${work:?}"/*
done
[ $failed = 0 ] || echo "not everything agrees" >&2
exit $failed
