#!/usr/bin/env bash
# Trains over several nodes. Submit it from the checkout; sbatch's options decide where it runs:
#   sbatch slurm/multinode.sh strategy=ddp
#   sbatch --nodes=4 --gpus-per-node=8 --time=12:00:00 slurm/multinode.sh strategy=ddp model=gpt2
# Whole nodes are taken. A node runs one task for each of its GPUs, or as many as --ntasks-per-node says.
#SBATCH --job-name=lightswitch
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "$SLURM_SUBMIT_DIR" # this script itself runs as a copy in Slurm's spool folder
[[ -e train.py ]] || { echo "found no train.py in $PWD; run sbatch in the checkout's folder" >&2; exit 2; }
# shellcheck source=slurm/site.example.sh
[[ ! -e slurm/site.sh ]] || source slurm/site.sh

python=python
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
gpus_per_node=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
gpus_per_node=${gpus_per_node##*:} # h100:8 is 8
tasks_per_node=${SLURM_NTASKS:+$((SLURM_NTASKS / SLURM_NNODES))}
tasks_per_node=${tasks_per_node:-${gpus_per_node:-1}}
cpus_per_task=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks_per_node))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}

# each task sees all GPUs of its node and takes its own; a step of an exclusive job gets none unless it asks
unset SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU
gpus=(${gpus_per_node:+"--gpus-per-node=$gpus_per_node"})

# the trainer takes its nodes and devices from what srun tells each task
exec srun --nodes="$SLURM_NNODES" --ntasks-per-node="$tasks_per_node" --cpus-per-task="$cpus_per_task" \
  "${gpus[@]}" --kill-on-bad-exit=1 "$python" train.py "$@"
