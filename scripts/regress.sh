#!/usr/bin/env bash
# Did a change make iec slower? Measures two states of the source in alternating pairs, adds the result to a history and
# draws it as a page.
#
#   scripts/regress.sh [OPTION...] [ROW...]
#
#   --base COMMIT     the state to compare with (the last commit in the history, or HEAD~1)
#   --rounds N        pairs of measurements per row (7; fewer than 6 cannot be significant)
#   --threads N       threads (all cores)
#   --models DIR      where the models lie or are made (target/race; 8 GB)
#   --history FILE    lines of JSON, one per row and run (benches/history.jsonl)
#   --page FILE       the page (target/regress/index.html)
#   --draw            only draw the page from the history
#   ROW               rows of scripts/before-after.sh (decode, prefill, batch-16, nl4-decode, int8-prefill, start)
#
# Both states are built in target/regress, the base from its commit, the other from the working tree. A row is slower or
# faster if an exact Wilcoxon signed-rank test of the logarithms of the ratios gives p < 0.05 (two-sided) and the median
# differs from 1 by more than 2 %. Exit codes: 0, nothing is slower; 4, something is; 2, usage.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "regress.sh: $*" >&2; exit 2; }
base='' rounds=7 threads=$(nproc) models=target/race history=benches/history.jsonl page=target/regress/index.html draw=0
rows=()
while [ $# -gt 0 ]; do
  case $1 in
    --base) base=$2; shift ;; --rounds) rounds=$2; shift ;; --threads) threads=$2; shift ;;
    --models) models=$2; shift ;; --history) history=$2; shift ;; --page) page=$2; shift ;; --draw) draw=1 ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --*) die "unknown option $1; the head of this file explains the options" ;;
    *) rows+=("$1") ;;
  esac
  shift
done
[ ${#rows[@]} -gt 0 ] || rows=(decode prefill batch-16 nl4-decode int8-prefill start)
mkdir -p target/regress "$(dirname "$page")" "$(dirname "$history")"

# build COMMIT: makes target/regress/iec-COMMIT, if it is not there yet
build() {
  [ -x "target/regress/iec-$1" ] && return
  local tree=target/regress/tree
  git worktree remove --force "$tree" 2>/dev/null || true
  git worktree add --detach --force "$tree" "$1" >&2
  (cd "$tree" && CARGO_TARGET_DIR=../build cargo build --release --locked --bin iec) >&2
  cp target/regress/build/release/iec "target/regress/iec-$1"
  git worktree remove --force "$tree"
}

# judge: reads lines `row unit before after`, and prints for each row one line of JSON
judge() {
  awk -v head="$1" '
    function sort(v, n,   i, j, t) { for (i = 2; i <= n; i++) { t = v[i]; for (j = i - 1; j > 0 && v[j] > t; j--) v[j + 1] = v[j]; v[j + 1] = t } }
    function median(v, n) { sort(v, n); return n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2 }
    # Exact two-sided p of the Wilcoxon signed-rank test. Ranks are doubled, so that those of ties are whole numbers.
    function wilcoxon(d, n,   i, j, total, rank, plus, ways, sum, extreme, small) {
      for (i = 1; i <= n; i++) {
        rank[i] = 2
        for (j = 1; j <= n; j++) if (j != i) rank[i] += (abs(d[j]) < abs(d[i])) * 2 + (abs(d[j]) == abs(d[i]))
        total += rank[i]
        if (d[i] > 0) plus += rank[i]; else if (d[i] == 0) plus += rank[i] / 2 }
      delete ways; ways[0] = 1; sum = 0
      for (i = 1; i <= n; i++) { for (j = sum; j >= 0; j--) ways[j + rank[i]] += ways[j]; sum += rank[i] }
      small = plus < total - plus ? plus : total - plus
      for (j = 0; j <= total; j++) if (j <= small || j >= total - small) extreme += ways[j]
      extreme /= 2 ^ n
      return extreme > 1 ? 1 : extreme
    }
    function abs(x) { return x < 0 ? -x : x }
    function finish(   i, b, a, r, d, m, p, list1, list2, better, word) {
      if (!n) return
      for (i = 1; i <= n; i++) {
        b[i] = before[i]; a[i] = after[i]; r[i] = unit == "s" ? before[i] / after[i] : after[i] / before[i]; d[i] = log(r[i])
        list1 = list1 (i > 1 ? "," : "") sprintf("%.5g", before[i]); list2 = list2 (i > 1 ? "," : "") sprintf("%.5g", after[i])
      }
      p = wilcoxon(d, n); m = median(r, n)
      word = p < 0.05 && m < 0.98 ? "slower" : p < 0.05 && m > 1.02 ? "faster" : "same"
      printf "{%s,\"row\":\"%s\",\"unit\":\"%s\",\"before\":%.4g,\"after\":%.4g,\"speed\":%.4f,\"least\":%.4f,\"most\":%.4f,\"p\":%.4f,\"verdict\":\"%s\",\"pairs\":{\"before\":[%s],\"after\":[%s]}}\n", \
        head, row, unit, median(b, n), median(a, n), m, r[1], r[n], p, word, list1, list2
      n = 0
    }
    $1 != row { finish(); row = $1; unit = $2 }
    { n++; before[n] = $3; after[n] = $4 }
    END { finish() }'
}

# drawing: reads the history, prints the page: for each row the speed of each run relative to its base, with the extremes
drawing() {
  awk '
    function text(key,   at) { if (match($0, "\"" key "\":\"[^\"]*\"")) { at = length(key) + 4; return substr($0, RSTART + at, RLENGTH - at - 1) } return "" }
    function number(key,   at) { if (match($0, "\"" key "\":[-0-9.e+]+")) { at = length(key) + 3; return substr($0, RSTART + at, RLENGTH - at) + 0 } return 0 }
    function escaped(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); return s }
    function y(speed) { speed = speed < 0.5 ? 0.5 : speed > 2 ? 2 : speed; return 110 - 100 * (log(speed) - log(0.5)) / (log(2) - log(0.5)) }
    { row = text("row"); if (!(row in count)) order[++rows] = row
      i = ++count[row]; speed[row, i] = number("speed"); least[row, i] = number("least"); most[row, i] = number("most"); p[row, i] = number("p")
      was[row, i] = number("before"); is[row, i] = number("after"); unit[row] = text("unit"); verdict[row, i] = text("verdict")
      of[row, i] = text("date") " " text("commit") " against " text("base") ", " text("isa") ", " number("threads") " threads, " text("machine") }
    END {
      print "<!DOCTYPE html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>Speed of iec</title>"
      print "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}table{border-collapse:collapse}td,th{padding:.1rem .8rem;text-align:right}td:last-child,th:last-child{text-align:left}svg{width:100%;height:130px;background:#f6f6f6}.slower{fill:#c22;stroke:#c22;color:#c22}.faster{fill:#283;stroke:#283;color:#283}.same{fill:#567;stroke:#567}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg{background:#242424}.same{fill:#9ab;stroke:#9ab}}</style>"
      print "<h1>Speed of iec</h1><p>Each point is a build relative to the one before it: the median of alternating pairs on one machine, with the extremes. 1 is as fast; the dotted lines are half and twice the speed. Red: slower, p &lt; 0.05."
      for (k = 1; k <= rows; k++) {
        row = order[k]; n = count[row]
        printf "<h2>%s</h2><svg viewBox=\"0 0 600 120\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"relative speed of %s\">", escaped(row), escaped(row)
        printf "<path d=\"M0 60H600\" stroke=\"#999\"/><path d=\"M0 10H600M0 110H600\" stroke=\"#999\" stroke-dasharray=\"2 6\"/>"
        for (i = 1; i <= n; i++) { x = 600 * (i - 0.5) / n
          printf "<g class=\"%s\"><title>%s: %.3f (%.3f-%.3f)</title><path d=\"M%.1f %.1fV%.1f\"/><rect x=\"%.1f\" y=\"%.1f\" width=\"6\" height=\"6\"/></g>", verdict[row, i], escaped(of[row, i]), speed[row, i], least[row, i], most[row, i], x, y(least[row, i]), y(most[row, i]), x - 3, y(speed[row, i]) - 3 }
        printf "</svg><table><tr><th>before<th>after<th>speed<th>least-most<th>p<th>run"
        for (i = n; i > 0; i--) printf "<tr class=\"%s\"><td>%.4g %s<td>%.4g %s<td>%.3f<td>%.3f-%.3f<td>%.3f<td>%s", verdict[row, i], was[row, i], unit[row], is[row, i], unit[row], speed[row, i], least[row, i], most[row, i], p[row, i], escaped(of[row, i])
        print "</table>"
      }
    }'
}

if [ "$draw" = 0 ]; then
  [ -n "$base" ] || base=$(sed -nE 's/.*"commit":"([0-9a-f]+)".*/\1/p' "$history" 2>/dev/null | tail -1)
  base=$(git rev-parse --short=8 --verify "${base:-HEAD~1}^{commit}") || die "there is no commit $base"
  commit=$(git rev-parse --short=8 HEAD)
  git diff --quiet HEAD -- src Cargo.toml Cargo.lock build.rs || commit+=+
  build "$base"
  CARGO_TARGET_DIR=target/regress/build cargo build --release --locked --bin iec >&2
  cp target/regress/build/release/iec target/regress/iec-new
  pairs=target/regress/pairs.txt
  : >"$pairs"
  scripts/before-after.sh "target/regress/iec-$base" target/regress/iec-new --rounds "$rounds" --threads "$threads" \
    --models "$models" --pairs "$pairs" "${rows[@]}"
  isa=$(target/regress/iec-new --version -v | sed -nE 's/.*instruction sets[^:]*: ([a-z0-9]+).*/\1/p')
  machine=$(sed -nE 's/^model name\s*: (.*)/\1/p' /proc/cpuinfo | head -1 | tr -d '"\\')
  head="\"date\":\"$(date -u +%F)\",\"commit\":\"$commit\",\"base\":\"$base\",\"machine\":\"$machine\",\"isa\":\"$isa\",\"threads\":$threads"
  judge "$head" <"$pairs" | tee target/regress/last.jsonl >>"$history"
fi
[ -s "$history" ] || die "$history is empty; measure first"
drawing <"$history" >"$page.part"
mv "$page.part" "$page"
echo "page: $page" >&2
if [ "$draw" = 0 ] && grep -q '"verdict":"slower"' target/regress/last.jsonl; then
  sed -nE 's/.*"row":"([^"]*)".*"speed":([0-9.]+),.*"p":([0-9.]+),"verdict":"slower".*/slower: \1, \2 times the speed (p = \3)/p' \
    target/regress/last.jsonl >&2
  exit 4
fi
