# What only this site needs. Copy it to slurm/site.sh, which git ignores, and keep what applies.
# Your shell reads it before sbatch (`source slurm/site.sh`), and the job scripts read it again inside the job.
# shellcheck shell=bash disable=SC2034,SC2154 # slurm/job.sh reads what is set, and sets $checkout

export SBATCH_ACCOUNT=my-project
export SBATCH_PARTITION=gpu,gpu-large # the first that has room
export SBATCH_CONSTRAINT=a100 # where GPUs differ: each node of a job must have as many

# inside the job alone
if [[ -n ${SLURM_JOB_ID:-} ]]; then
  workdir=/scratch/$USER/lightswitch # where runs/ goes; without it, the folder that sbatch was typed in
  min_nodes=2 # a job that lost nodes goes on with so many at least
  max_failures=5 # a job that failed is started again so often at most; without it, three times

  # which Python a job takes: one of these lines; without any, the environment that sbatch was typed in, or .venv
  python=(~/miniconda3/envs/mine/bin/python) # conda
  module load python/3.12 cuda && python=(python) # environment modules
  python=("$checkout/.venv/bin/python") # made by make, or by uv
  python=(apptainer exec --nv --bind "$checkout,$workdir" "$checkout/image.sif" python) # made by docs/examples/container
  python=(env python) # by pyxis, whose PYTHONPATH is the checkout's, and not the image's
  srun_options=(--container-image="$checkout/image.sqsh" --container-mounts="$checkout,$workdir" --container-env=PYTHONPATH)

  export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 # the network that the nodes share

  # nodes without internet, or with a proxy
  export WANDB_MODE=offline HF_HUB_OFFLINE=1 HF_HOME=/scratch/$USER/huggingface
  export HTTP_PROXY=http://proxy:3128 HTTPS_PROXY=http://proxy:3128 NO_PROXY=localhost,.cluster
fi
