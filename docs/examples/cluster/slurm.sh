#!/bin/bash
#SBATCH --job-name=cusearch
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
# Nodes 1 and 2: the learner, each with a retriever, which rank 0 checks (torchrun says where that is); nodes 3 and 4: a
# retriever and eight workers each; on node 1 also Redis.
# Before: export CUSEARCH_REDIS_PASSWORD, a random text of your own. For another run: RUN=other sbatch slurm.sh, where
# /shared/other.toml has its name and folder.
set -euo pipefail
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from sbatch (Slurm 22.05): each step had one core
: "${CUSEARCH_REDIS_PASSWORD:?export a password for Redis}"

RUN=${RUN:-cluster} DATA=/shared/redis-${RUN:-cluster} # two servers must not write to one folder
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
START="cusearch worker"
SETTINGS="/shared/$RUN.toml --redis.url redis://$HEAD:6379/0"
export START SETTINGS DATA

on() { # on NODES COUNT COMMAND: once per node
    srun --overlap --nodelist="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --gpus-per-node=8 bash -c "$3" &
}

mkdir -p "$DATA"
# The settings come through a pipe, so that the password is in no list of processes.
on "$HEAD" 1 'printf "%s\n" "requirepass $CUSEARCH_REDIS_PASSWORD" "bind * -::*" "dir $DATA" "appendonly yes" \
    "maxmemory-policy noeviction" | flock -w 180 -E 75 "$DATA/lock" redis-server - || {
    STATUS=$?
    [ $STATUS = 75 ] && echo "another Redis has $DATA" >&2 || echo "Redis has ended with status $STATUS" >&2
    scancel "$SLURM_JOB_ID"
}'
REDIS=$!

on "$HEAD,${NODES[1]}" 2 '$START retriever $SETTINGS'
RETRIEVER=$!

# Each worker takes a GPU of its node that no other worker has. One that fails is started again; when the run has ended,
# each ends with status 0.
on "${NODES[2]},${NODES[3]}" 2 '
$START retriever $SETTINGS &
RETRIEVER=$! WORKERS=()
for worker in 1 2 3 4 5 6 7 8; do
    (until $START rollout $SETTINGS; do sleep 10; done) &
    WORKERS+=($!)
done
wait "${WORKERS[@]}"
kill $RETRIEVER'
WORKERS=$!

# Nobody else may reach port 29500: torchrun unpickles what is there.
# torchrun starts all ranks again when one fails; they continue from the newest checkpoint.
on "$HEAD,${NODES[1]}" 2 "torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 --shutdown-timeout=3500 \
    --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$HEAD:29500 --no-python cusearch worker learner $SETTINGS"
LEARNER=$!

STATUS=0
wait $LEARNER || STATUS=$?
kill $WORKERS $RETRIEVER $REDIS
wait
exit $STATUS
