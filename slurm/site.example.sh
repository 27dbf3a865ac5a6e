# What only this site needs. Copy it to slurm/site.sh, which git ignores, and keep what applies.
# Your shell reads it before sbatch (`source slurm/site.sh`), and multinode.sh reads it again inside the job.
# shellcheck shell=bash

export SBATCH_ACCOUNT=my-project
export SBATCH_PARTITION=gpu

# inside the job alone
if [[ -n ${SLURM_JOB_ID:-} ]]; then
  module load cuda
  export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
fi
