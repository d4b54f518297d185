#!/bin/bash
# Converts or calibrates a model on many nodes: an array of parts, then a job that merges them.
#
#   scripts/slurm/convert.sh PARTS OUT COMMAND [OPTIONS…]
#   scripts/slurm/convert.sh 8 packs/big pack --hf-dir models/big --q4-map q4.json
#   scripts/slurm/convert.sh 8 big.calib calib packs/big --text calibration.txt --hessian
#
# OUT is the --out-dir of the command, or the --out of calib and export-gguf. OUT, the model and iec must be where all
# nodes see them. IEC names the program (default: iec on PATH); SBATCH_OPTIONS is given to both jobs, as in
# SBATCH_OPTIONS='--partition=cpu --account=me'.
set -eu
if [ $# -lt 3 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
parts=$1 out=$2
shift 2
case $1 in
    calib | export-gguf) option=--out ;;
    *) option=--out-dir ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out.log"
read -ra options <<<"${SBATCH_OPTIONS:-}"
array=$(sbatch --parsable "${options[@]}" --array="1-$parts" --output="$out.log/part-%a.log" \
    "$here/part.sbatch" "$parts" "$@" "$option" "$out")
merge=$(sbatch --parsable "${options[@]}" --dependency="afterok:$array" --output="$out.log/merge.log" \
    "$here/merge.sbatch" "$out")
echo "parts: job $array, merge: job $merge, logs: $out.log/"
