#!/usr/bin/env bash
# Trains on one GPU of a node that other jobs may share, or on several of its GPUs. Submit it from any folder: runs/ goes
# there, and what the job prints is runs/slurm-ID.out.
#   sbatch slurm/single.sh model=gpt2
#   sbatch --gpus-per-node=4 --cpus-per-gpu=8 --time=12:00:00 slurm/single.sh strategy=ddp
# A run that its time limit cuts short is requeued, and goes on.
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

# the trainer takes its nodes and devices from what srun tells each task
launch "$tasks_per_node" "${python[@]}" "$train" "$@"
