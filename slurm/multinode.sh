#!/usr/bin/env bash
# Trains over several nodes. Submit it from the checkout; sbatch's options decide where it runs:
#   sbatch slurm/multinode.sh strategy=ddp
#   sbatch --nodes=4 --gpus-per-node=8 --time=12:00:00 slurm/multinode.sh strategy=fsdp model=gpt2
# Whole nodes are taken. A node runs one task for each of its GPUs, or as many as --ntasks-per-node says.
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

# the trainer takes its nodes and devices from what srun tells each task
launch "$tasks_per_node" "${python[@]}" train.py "$@"
