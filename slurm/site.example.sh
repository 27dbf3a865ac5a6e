# What only this site needs. Copy it to slurm/site.sh, which git ignores, and keep what applies.
# Your shell reads it before sbatch (`source slurm/site.sh`), and the job scripts read it again inside the job.
# shellcheck shell=bash disable=SC2034 # slurm/job.sh reads the arrays

export SBATCH_ACCOUNT=my-project
export SBATCH_PARTITION=gpu

# inside the job alone
if [[ -n ${SLURM_JOB_ID:-} ]]; then
  module load cuda
  export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
  python=(apptainer exec --nv image.sif python)   # or, with pyxis:
  srun_options=(--container-image=image.sqsh)
fi
