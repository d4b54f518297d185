#!/usr/bin/env bash
# Does a change cost more instructions? Counts what the kernels execute, which no other process disturbs.
#
#   scripts/count-instructions.sh            compares with benches/instructions.txt; fails if a row has 3 % more
#   scripts/count-instructions.sh --update   writes that table; say in the commit why rows became more expensive
#   scripts/count-instructions.sh --kernels PROGRAM   a built benchmark, instead of building it
#
# Valgrind runs `cargo bench --bench kernels -- count` with one thread, for AVX2 and without vector instructions. A row has
# the instructions per weight and token (products), per number (activations to ...), per weight (pack ...) or per call (the
# others). AVX-512, which Valgrind does not have, is counted in the compiled program instead: for each innermost loop with
# `vpdpbusd`, which multiplies 64 pairs of bytes, the number of these and of all instructions, in ascending order. A call
# inside a loop of AVX2 or AVX-512 that multiplies integers is an error with any table.
# Exits with 3 where valgrind or objdump is missing, the processor has no AVX2, or the compiler is not that of the table:
# make the table of the unchanged sources with --update then.
set -euo pipefail
cd "$(dirname "$0")/.."

table=benches/instructions.txt update='' kernels=''
while [ $# -gt 0 ]; do
    case $1 in
        --update) update=1 ;;
        --kernels) kernels=${2:?--kernels needs a value}; shift ;;
        *) echo "count-instructions.sh: unknown option $1; the head of this file lists them" >&2; exit 2 ;;
    esac
    shift
done
for tool in valgrind objdump; do
    command -v $tool >/dev/null || { echo "$tool is missing (Debian: valgrind, binutils)" >&2; exit 3; }
done
grep -qw avx2 /proc/cpuinfo && [ "$(uname -m)" = x86_64 ] || { echo "this processor has no AVX2" >&2; exit 3; }
compiler=$(rustc --version)
[ -n "$update" ] || grep -qxF "# $compiler" "$table" || { echo "$table is of another compiler than $compiler" >&2; exit 3; }
[ -n "$kernels" ] || kernels=$(cargo bench --locked --bench kernels --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
[ -x "$kernels" ] || { echo "cargo bench --bench kernels --no-run built no executable" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count() { # count ISA [FILTER...]: lines `ISA <tab> name <tab> instructions per unit`
    IEC_ISA=$1 IEC_THREADS=1 valgrind --tool=callgrind --callgrind-out-file="$work/$1" --dump-instr=no \
        --collect-atstart=no --toggle-collect='kernels::count::counted' --dump-after='kernels::count::counted' \
        "$kernels" count "${@:2}" >"$work/$1.names" 2>"$work/$1.log" </dev/null || { cat "$work/$1.log" >&2; exit 1; }
    # Each call wrote one file, numbered from 1, with a line `totals: N` or `summary: N`.
    local number=0 name units
    while IFS=$'\t' read -r name units; do
        number=$((number + 1))
        awk -v isa="$1" -v name="$name" -v units="$units" '/^(totals|summary): / && !done {
            printf "%s\t%s\t%.4g\n", isa, name, $2 / units; done = 1 }' "$work/$1.$number"
    done <"$work/$1.names"
}
# Innermost loops that multiply integers: lines `instruction set <tab> products <tab> instructions <tab> calls`.
loops() {
    objdump -d --no-show-raw-insn "$kernels" | awk '
        function ends(   i, from, k, dots, calls, inner) {
            for (i = 1; i <= n; i++) {
                if (!(target[i] in place) || place[target[i]] > i) continue
                from = place[target[i]]; dots = calls = 0; inner = 1
                for (k = from; k < i; k++) if ((target[k] in place) && place[target[k]] <= k && place[target[k]] >= from) inner = 0
                for (k = from; k <= i; k++) { dots += op[k] ~ product; calls += op[k] ~ /^call/ }
                if (inner && dots) printf "%s\t%d\t%d\t%d\n", wanted, dots, i - from + 1, calls
            }
        }
        /^[0-9a-f]+ </ {
            if (wanted) ends()
            wanted = /avx512/ ? "avx512" : /avx2/ ? "avx2" : ""
            product = wanted == "avx512" ? "^vpdpbusd$" : "^(vpdpbusd|vpmaddubsw|vpmaddwd)$"
            n = 0; split("", place); split("", target); next
        }
        wanted && /^ +[0-9a-f]+:/ {
            n++; at = $1; sub(":", "", at); place[at] = n; op[n] = $2
            target[n] = $2 ~ /^j/ ? $3 : "-"
        }
        END { if (wanted) ends() }' | sort -k1,1 -k2,2n -k3,3n
}
loops >"$work/loops"
[ -s "$work/loops" ] || { echo "found no loop of the kernels in $kernels" >&2; exit 1; }
if awk '$4 > 0 { found = 1 } END { exit !found }' "$work/loops"; then
    echo "a loop of the kernels calls a function (instruction set, products, instructions, calls):" >&2
    awk '$4 > 0' "$work/loops" >&2
    exit 1
fi
count avx2 >"$work/avx2.table" &
count scalar ' x int' >"$work/scalar.table"
wait $!
{
    echo "# Instructions of the kernels, by scripts/count-instructions.sh --update"
    echo "# $compiler"
    cat "$work/avx2.table" "$work/scalar.table"
    awk '$1 == "avx512" { if ($2 != last) k = 0; last = $2; printf "%s\t%d products, loop %d\t%d\n", $1, $2, ++k, $3 }' "$work/loops"
} >"$work/table"

if [ -n "$update" ]; then
    cp "$work/table" "$table"
    exit
fi
awk -F '\t' '
    FNR == NR { if (!/^#/) before[$1 FS $2] = $3; next }
    /^#/ { next }
    !(($1 FS $2) in before) { print "not in the table: " $1 ", " $2; bad = 1; next }
    { seen[$1 FS $2] = 1; rows++; ratio = $3 / before[$1 FS $2] }
    ratio > 1.03 { printf "%.1f %% more: %s, %s: %s instead of %s\n", 100 * (ratio - 1), $1, $2, $3, before[$1 FS $2]; bad = 1 }
    ratio < 0.97 { printf "%.1f %% less: %s, %s: %s instead of %s\n", 100 * (1 - ratio), $1, $2, $3, before[$1 FS $2] }
    END {
        for (row in before) if (!(row in seen)) { sub(FS, ", ", row); print "no longer counted: " row; bad = 1 }
        if (bad) { print "say in the commit why, and run scripts/count-instructions.sh --update"; exit 1 }
        print rows " rows within 3 % of benches/instructions.txt"
    }' "$table" "$work/table"
