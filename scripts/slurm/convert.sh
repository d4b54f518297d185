#!/bin/bash
# Converts a model on many nodes: an array of parts, then a job that merges them.
#
#   scripts/slurm/convert.sh PARTS OUT_DIR COMMAND [OPTIONS…]
#   scripts/slurm/convert.sh 8 packs/big pack --hf-dir models/big --q4-map q4.json
#
# OUT_DIR, the model and iec must be where all nodes see them. IEC names the program (default: iec on PATH);
# SBATCH_OPTIONS is given to both jobs, as in SBATCH_OPTIONS='--partition=cpu --account=me'.
set -eu
if [ $# -lt 3 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
parts=$1 out_dir=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out_dir.log"
read -ra options <<<"${SBATCH_OPTIONS:-}"
array=$(sbatch --parsable "${options[@]}" --array="1-$parts" --output="$out_dir.log/part-%a.log" \
    "$here/part.sbatch" "$parts" "$@" --out-dir "$out_dir")
merge=$(sbatch --parsable "${options[@]}" --dependency="afterok:$array" --output="$out_dir.log/merge.log" \
    "$here/merge.sbatch" "$out_dir")
echo "parts: job $array, merge: job $merge, logs: $out_dir.log/"
