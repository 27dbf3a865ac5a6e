#!/usr/bin/env bash
# Trains a run for each task of a job array: before -- the overrides of all, after it a task's own in each line.
#   sbatch --array=0-3 slurm/sweep.sh model=gpt2 -- seed=1 seed=2 'seed=1 optimizer.lr=1e-3' seed=3
#   sbatch --array=0-99%8 slurm/sweep.sh -- "$(cat overrides.txt)"
# Each is a run of single.sh, on one GPU; it is requeued and goes on by itself. For whole nodes, say so:
#   sbatch --array=0-3 --nodes=2 --gpus-per-node=8 --exclusive --mem=0 slurm/sweep.sh strategy=fsdp -- …
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-gpu=4
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --output=/dev/null
#SBATCH --open-mode=append
set -euo pipefail
# Slurm runs a copy of this script, and knows where the script is
scripts=${BASH_SOURCE[0]%/*}
[[ -e $scripts/job.sh ]] || scripts=$(scontrol show job "${SLURM_JOB_ID:?is not set; submit this by sbatch}" |
  sed -nE 's#^ *Command=##; T; s#/[^/ ]+\.sh( .*)?$##p' | sort -u)
[[ -e $scripts/job.sh ]] || {
  echo "error: found no job.sh in $scripts; submit the script inside its checkout, with sbatch CHECKOUT/slurm/NAME.sh" |
    tee "slurm-$SLURM_JOB_ID.out" >&2
  exit 2
}
# shellcheck source=slurm/job.sh
source "$scripts/job.sh"

common=()
while (($#)) && [[ $1 != -- ]]; do common+=("$1") && shift; done
lines=()
(($# < 2)) || mapfile -t lines < <(shift && printf '%s\n' "$@" | sed '/^[[:space:]]*$/d')

if [[ -z ${SLURM_ARRAY_TASK_ID:-} || -z ${lines[SLURM_ARRAY_TASK_ID]+there} ]]; then
  refuse "found array task ${SLURM_ARRAY_TASK_ID:-none}, but ${#lines[@]} lines of overrides after --; use --array=0-N"
fi
if ! words=$(xargs printf '%s\n' <<< "${lines[SLURM_ARRAY_TASK_ID]}" 2> /dev/null); then # quotes hold a word together
  refuse "found a quote that is not closed in line $SLURM_ARRAY_TASK_ID (from 0) of the overrides after --: \
${lines[SLURM_ARRAY_TASK_ID]}; close it, or put a backslash before it"
fi
mapfile -t own <<< "$words"
launch "$tasks_per_node" "${python[@]}" "$train" "${common[@]}" "${own[@]}"
