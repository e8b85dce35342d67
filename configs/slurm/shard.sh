#!/bin/bash
# configs/slurm/shard.sh SOURCE DEST [option of `streamvid shard` …]        run it on a login node; do not use sbatch
#
# Shards on a cluster: an array of tasks probes the files, a second one encodes native clips, a third one builds the
# shards, and a last job seals the dataset. With options of curation, one more array measures the files. SOURCE and DEST
# are on a file system that all machines share, or in an object store. Shares of tasks that were lost are done by the
# next array or by the last job. If the last job does not seal the dataset, for example because of its time limit, run
# this script again: finished work is kept.
#
#   TASKS=64 CPUS=32 configs/slurm/shard.sh /data/videos /data/ds --preset wan2.1-480p --clips native
#   SBATCH_PARTITION=cpu SBATCH_TIMELIMIT=8:00:00 configs/slurm/shard.sh s3://videos/raw s3://datasets/ds
#
# TASKS: number of tasks (16). CPUS: number of CPUs and workers per task (8). sbatch reads its own SBATCH_… variables.
#
#SBATCH --job-name=streamvid-shard
#SBATCH --ntasks=1
#SBATCH --output=%x-%A-%a.log
set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then
  cpus=(--cpus-per-task="${CPUS:-8}")
  after=()
  phases=(probe encode build)
  case " $* " in *" --scores"* | *" --scene-cuts "* | *" --black-bars "*) phases+=(curate) ;; esac
  for _ in "${phases[@]}"; do
    job=$(sbatch --parsable "${cpus[@]}" "${after[@]}" --array="0-$((${TASKS:-16} - 1))" "$0" "$@")
    after=(--dependency="afterany:${job%%;*}")
  done
  exec sbatch "${cpus[@]}" "${after[@]}" --output=%x-%j.log "$0" "$@"
fi

task=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  task=(--task "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))/$SLURM_ARRAY_TASK_COUNT")
fi
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
exec srun streamvid shard "$@" "${task[@]}"
