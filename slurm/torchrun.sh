#!/usr/bin/env bash
# As multinode.sh, with one torchrun a node that starts the node's processes:
#   sbatch --nodes=4 --gpus-per-node=8 slurm/torchrun.sh strategy=fsdp model=gpt2
#SBATCH --job-name=lightswitch
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set; submit this by sbatch}" # this script itself runs as a copy in Slurm's spool folder
[[ -e slurm/job.sh ]] || { echo "found no slurm/job.sh in $PWD; run sbatch in the checkout's folder" >&2; exit 2; }
source slurm/job.sh

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a head node
# torchrun's warnings that it ends the other processes would come before the line on the one that failed
export TORCH_LOGS=${TORCH_LOGS:--torch.distributed.elastic}
launch 1 "${python[@]}" -m torch.distributed.run "${torchrun_options[@]}" --nnodes="$SLURM_NNODES" \
  --nproc-per-node="$tasks_per_node" --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" \
  --rdzv-id="$SLURM_JOB_ID" train.py "$@"
