#!/usr/bin/env bash
# As single.sh, over several nodes, each of which is taken whole:
#   sbatch slurm/multinode.sh strategy=ddp
#   sbatch --nodes=4 --gpus-per-node=8 --time=12:00:00 slurm/multinode.sh strategy=fsdp model=gpt2
#   sbatch --nodes=2-4 slurm/multinode.sh strategy=fsdp    # as many as there are; goes on with the rest if one is lost
# A node runs one task for each of its GPUs, or as many as --ntasks-per-node says.
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --no-kill
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
