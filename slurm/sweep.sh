#!/usr/bin/env bash
# Trains a run for each task of a job array: before -- the overrides of all, after it a task's own in each line.
#   sbatch --array=0-3 slurm/sweep.sh strategy=fsdp model=gpt2 -- seed=1 seed=2 'seed=1 optimizer.lr=1e-3' seed=3
#   sbatch --array=0-99%8 --nodes=1 slurm/sweep.sh -- "$(cat overrides.txt)"
# Each is a run of slurm/multinode.sh, and takes the same options of sbatch; it is requeued and goes on by itself.
#SBATCH --job-name=lightswitch-sweep
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

common=()
while (($#)) && [[ $1 != -- ]]; do common+=("$1") && shift; done
lines=()
(($# < 2)) || mapfile -t lines < <(shift && printf '%s\n' "$@" | sed '/^[[:space:]]*$/d')

if [[ -z ${SLURM_ARRAY_TASK_ID:-} || -z ${lines[SLURM_ARRAY_TASK_ID]+there} ]]; then
  echo "found array task ${SLURM_ARRAY_TASK_ID:-none}, and ${#lines[@]} lines of overrides after --; use --array=0-N" >&2
  exit 2
fi
if ! words=$(xargs printf '%s\n' <<< "${lines[SLURM_ARRAY_TASK_ID]}" 2> /dev/null); then # quotes hold a word together
  echo "found a quote that is not closed in line $SLURM_ARRAY_TASK_ID (from 0) of the overrides after --:" \
    "${lines[SLURM_ARRAY_TASK_ID]}; close it, or put a backslash before it" >&2
  exit 2
fi
mapfile -t own <<< "$words"
exec bash "$SLURM_SUBMIT_DIR/slurm/multinode.sh" "${common[@]}" "${own[@]}"
