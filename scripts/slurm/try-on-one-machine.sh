#!/bin/bash
# Tries the scripts of this directory with a real Slurm on one machine: a controller and a node in a temporary
# directory, on loopback only, gone at the end. Needs Debian's packages slurm-wlm and munge, and root (a node daemon
# starts the jobs of users); nothing of an installed Slurm is touched.
#
#   scripts/slurm/try-on-one-machine.sh [PATH_OF_IEC]
#
# Converts a synthetic model as 4 array tasks and a merge job, interrupts one task and lets it go on, and compares the
# result with that of one process, byte for byte. Then calibrates the model in the same ways.
set -eu
IEC=$(realpath "${1:-$(command -v iec || echo target/release/iec)}")
export IEC
here=$(cd "$(dirname "$0")" && pwd)
export PATH=$PATH:/usr/sbin
for program in "$IEC" munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "missing: $program (apt-get install slurm-wlm munge)" >&2; exit 1; }
done
work=$(mktemp -d /tmp/iec-slurm.XXXXXX)
chmod 755 "$work"
cd "$work"
mkdir state spool munge

stop() {
    status=$?
    [ $status = 0 ] || tail -n 20 ./*.log packs/*.log/* stats/*.log/* 2>/dev/null || true
    for name in slurmd slurmctld munged; do
        # Only what was started here: their own pid files.
        [ ! -s "$work/$name.pid" ] || kill "$(cat "$work/$name.pid")" 2>/dev/null || true
    done
    sleep 1
    rm -rf "$work"
    exit $status
}
trap stop EXIT

dd if=/dev/urandom of=munge/key bs=1024 count=1 status=none
chmod 400 munge/key
munged --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munge/seed"
port=$((20000 + RANDOM % 10000))
export SLURM_CONF=$work/slurm.conf
cat >slurm.conf <<CONF
ClusterName=iec
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld
slurmd
for _ in $(seq 60); do
    sinfo --noheader --format=%t 2>/dev/null | grep -qx idle && break
    sleep 1
done
sinfo

cat >config.json <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16,
 "num_key_value_heads": 4, "vocab_size": 16384, "num_hidden_layers": 8, "intermediate_size": 2816, "torch_dtype": "bfloat16",
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-05}
JSON
cat >rules.json <<'JSON'
{"version": 1, "rules": [{"include": "_proj", "scheme": "q4_0", "method": "search"}]}
JSON
"$IEC" synth --config config.json --out-dir model
echo "--- one process"
"$IEC" pack --hf-dir model --q4-map rules.json --out-dir one

# Waits until a job has left the queue.
finish() { while squeue --noheader --jobs="$1" 2>/dev/null | grep -q .; do sleep 0.2; done; }

echo "--- 4 array tasks and a merge"
SBATCH_OPTIONS='--cpus-per-task=1 --mem=0' "$here/convert.sh" 4 packs/array pack --hf-dir model --q4-map rules.json |
    tee submitted
jobs=$(sed 's/.*job \([0-9]*\), merge: job \([0-9]*\).*/\1 \2/' submitted)
finish "${jobs#* }"
grep -h . packs/array.log/*
diff -r one packs/array
echo "packs/array is identical to the pack of one process"

echo "--- a task that is interrupted and submitted again"
submit() { sbatch --parsable --cpus-per-task=1 --mem=0 --array="$1" --output=interrupted.log "$here/part.sbatch" 2 pack \
    --hf-dir model --q4-map rules.json --out-dir packs/again --checkpoint-every 1M; }
first=$(submit 1)
partial() { ls packs/again/.iec-*/part-1-of-2.journal 2>/dev/null; }
until [ "$(cat "$(partial)" 2>/dev/null | wc -l)" -ge 5 ]; do sleep 0.1; done
scancel --batch --signal=TERM "${first}_1"
finish "$first"
finish "$(submit 1)"
finish "$(submit 2)"
cat interrupted.log
"$IEC" merge --out-dir packs/again
diff -r one packs/again
echo "packs/again is identical, too"

text=$(realpath "$here/../../tests/text/tinystories_valid_30k.txt")
calib=(calib --hf-dir model --text "$text" --max-tokens 5000 --window 128 --hessian)
mkdir stats
echo "--- statistics of one process"
"$IEC" --threads 1 "${calib[@]}" --out stats/one

echo "--- statistics of 3 array tasks and a merge"
SBATCH_OPTIONS='--cpus-per-task=1 --mem=0' "$here/convert.sh" 3 stats/array "${calib[@]}" | tee submitted
jobs=$(sed 's/.*job \([0-9]*\), merge: job \([0-9]*\).*/\1 \2/' submitted)
finish "${jobs#* }"
grep -h . stats/array.log/*
cmp stats/one stats/array
echo "stats/array is identical to the statistics of one process"

echo "--- a calibration task that is interrupted and submitted again"
submit() { sbatch --parsable --cpus-per-task=1 --mem=0 --array="$1" --output=calibration.log "$here/part.sbatch" 2 \
    "${calib[@]}" --out stats/again --checkpoint-every 1M; }
first=$(submit 1)
partial() { ls stats/.iec-*/part-1-of-2.journal 2>/dev/null; }
until [ "$(cat "$(partial)" 2>/dev/null | wc -l)" -ge 5 ]; do sleep 0.1; done
scancel --batch --signal=TERM "${first}_1"
finish "$first"
finish "$(submit 1)"
finish "$(submit 2)"
cat calibration.log
"$IEC" merge --out stats/again
cmp stats/one stats/again
echo "stats/again is identical, too"
