#!/usr/bin/env bash
# As multinode.sh, with one torchrun a node that starts the node's processes:
#   sbatch --nodes=4 --gpus-per-node=8 slurm/torchrun.sh strategy=fsdp model=gpt2
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

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a head node
# torchrun's warnings that it ends the other processes would come before the line on the one that failed
export TORCH_LOGS=${TORCH_LOGS:--torch.distributed.elastic}
launch 1 "${python[@]}" -m torch.distributed.run "${torchrun_options[@]}" --nnodes="$SLURM_NNODES" \
  --nproc-per-node="$tasks_per_node" --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" \
  --rdzv-id="$SLURM_JOB_ID" "$train" "$@"
