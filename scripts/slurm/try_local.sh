#!/bin/bash
# Tries pretrain.sbatch under a real Slurm on this machine: 2 nodes x 2 ranks, on the CPU.
#
# Starts munged, slurmctld and two slurmd of its own in a temporary folder, submits a small model,
# interrupts it as the time limit would, and checks that it went back into the queue, resumed where
# it had saved and finished. Needs root, and the Debian packages slurm-wlm and munge. Takes about
# five minutes: Slurm waits two before it starts a requeued job again.

set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
STEPS=40
PORT=$((20000 + $$ % 10000))

for program in munged slurmctld slurmd sbatch; do
    command -v $program >/dev/null || { echo "$program is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done
[[ $(id -u) == 0 ]] || { echo "needs root, to start Slurm's daemons" >&2; exit 2; }

DIR=$(mktemp -d /tmp/longseq-slurm.XXXXXX)
pids=()
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    [[ ${KEEP:-no} == yes ]] && echo "kept: $DIR" || rm -rf "$DIR"
}
trap stop EXIT
mkdir -p "$DIR"/{spool,state,runs}

# munge: a key and a socket of its own.
head -c 1024 /dev/urandom >"$DIR/munge.key"
chmod 400 "$DIR/munge.key"
munged --foreground --force --key-file "$DIR/munge.key" --socket "$DIR/munge.socket" \
    --pid-file "$DIR/munge.pid" --log-file "$DIR/munge.log" --seed-file "$DIR/munge.seed" \
    >"$DIR/munged.out" 2>&1 &
pids+=($!)

cat >"$DIR/slurm.conf" <<END
ClusterName=local
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((PORT + 1)) CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((PORT + 2)) CPUs=2 Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
# GPUs in name only, for the script asks for some: Slurm wants device files, and opens none.
printf 'Name=gpu File=%s\n' /dev/null /dev/zero >"$DIR/gres.conf"
export SLURM_CONF=$DIR/slurm.conf

sleep 1
slurmctld -D -c >"$DIR/slurmctld.out" 2>&1 &
pids+=($!)
for node in n1 n2; do
    slurmd -D -N $node >"$DIR/slurmd-$node.out" 2>&1 &
    pids+=($!)
done
for _ in $(seq 30); do
    nodes=$(sinfo --noheader --format=%t 2>/dev/null || true)
    [[ $nodes == idle ]] && break
    sleep 1
done
sinfo
[[ $nodes == idle ]] || { tail -n 5 "$DIR"/*.log >&2; exit 1; }
[[ $(scontrol show hostnames 'n[1-2]' | head -n 1) == n1 ]]

# Flags given to the script win over its own: its shape, made small; its layout 2 x 2 as it stands.
export RUN_DIR=$DIR/runs/small PYTHON OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1
job=$(sbatch --parsable --gpus-per-node=2 --cpus-per-task=2 --time=30 --output="$DIR/job.out" \
    "$ROOT/scripts/slurm/pretrain.sbatch" \
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 \
    --num-query-groups 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 255 \
    --global-batch-size 4 --tensor-model-parallel-size 2 --context-parallel-size 2 \
    --train-iters "$STEPS" --lr-warmup-iters 0 --save-interval 1000)
echo "submitted job $job"

state_of_job() {
    { scontrol show job "$job" || true; } | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'
}

wait_for() { # PATTERN, SECONDS
    for _ in $(seq "$2"); do
        grep -qE "$1" "$DIR/job.out" 2>/dev/null && return
        [[ $(state_of_job) != FAILED ]] || break
        sleep 1
    done
    echo "the job is $(state_of_job); not seen within $2 s: $1" >&2
    tail -n 40 "$DIR/job.out" "$DIR"/*.log >&2 || true
    exit 1
}

wait_for "iteration +5/" 240
echo "interrupting it, as Slurm does before the time limit"
scancel --batch --signal=USR2 "$job"
wait_for "going back into the queue" 120
saved=$(<"$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt")
echo "saved at step $saved of $STEPS; waiting for Slurm to start it again"
wait_for "start 1:" 240
wait_for "iteration +$STEPS/" 240
for _ in $(seq 60); do
    state=$(state_of_job)
    [[ $state == COMPLETED ]] && break
    sleep 1
done

steps=$(grep -oE "iteration +[0-9]+/" "$DIR/job.out" | tr -dc '0-9\n')
[[ $steps == "$(seq "$STEPS")" ]] || { echo "steps are not 1 .. $STEPS, each once: $steps" >&2; exit 1; }
[[ $state == COMPLETED ]] || { echo "the job ended as $state" >&2; exit 1; }
logs=$(find "$RUN_DIR/logs" -name stdout.log | wc -l)
[[ $logs == 8 ]] || { echo "$logs logs instead of one a rank and start, 8" >&2; exit 1; }
grep -E "^job|parallel [0-9]+:|2D attention|iteration +($saved|$((saved + 1))|$STEPS)/|going back" "$DIR/job.out"
echo "passed: steps 1 .. $STEPS each once over two starts, job $state, one log a rank and start"
