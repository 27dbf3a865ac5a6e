# What the job scripts share: where a job runs, over how many processes, and what is done when it ends.
# shellcheck shell=bash disable=SC2034 # some of it the scripts alone use

# what slurm/site.sh may set otherwise
python=(python)
[[ ! -x .venv/bin/python ]] || python=(.venv/bin/python)
srun_options=()
torchrun_options=() # --max-restarts=3 starts processes again before the job is
max_failures=3 # after which a job is not started again
# shellcheck source=slurm/site.example.sh
[[ ! -e slurm/site.sh ]] || source slurm/site.sh

job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID} # the SLURM_JOB_ID of an array's last task means all tasks of the array
gpus_per_node=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
gpus_per_node=${gpus_per_node##*:} # h100:8 is 8
tasks_per_node=${SLURM_NTASKS:+$((SLURM_NTASKS / SLURM_NNODES))}
tasks_per_node=${tasks_per_node:-${gpus_per_node:-1}}
cpus_per_task=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / tasks_per_node))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}

# each task sees all GPUs of its node and takes its own; a step of an exclusive job gets none unless it asks
unset SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU
srun_options+=(${gpus_per_node:+"--gpus-per-node=$gpus_per_node"} --kill-on-bad-exit=1)
srun_options+=(--wait=10) # ranks end together: one that stays is on a node that was lost, and srun would wait for ever

# until Python listens, a signal would kill it
block_signals=(env --block-signal=USR1 --block-signal=USR2)
"${block_signals[@]}" true 2> /dev/null || block_signals=()

# launch TASKS COMMAND...: so many on every node of the job
launch() {
  local code=0
  srun --nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES * $1))" --ntasks-per-node="$1" \
    --cpus-per-task="$((cpus_per_task * tasks_per_node / $1))" "${srun_options[@]}" "${block_signals[@]}" "${@:2}" || code=$?
  requeue_after "$code"
  exit "$code"
}

# a run that was given notice requeues its job by itself; here are left those that were not, or have no scontrol
requeue_after() {
  local failures=slurm-$job.failures count
  case $1 in
    0 | 2 | 130) rm -f "$failures" ;; # 2: a mistake in the command, which would be made again; 130: Ctrl+C
    75) requeue ;; # it was given notice by SIGUSR1 or SIGUSR2, and has no scontrol in its container
    *)
      if is_preempted; then
        requeue
        return
      fi
      echo "exit code $1" >> "$failures"
      count=$(wc -l < "$failures")
      if ((count > max_failures)); then
        echo "failed $count times: not started again" >&2
      else
        echo "failed with exit code $1, time $count of at most $max_failures: requeued" >&2
        requeue
      fi
      ;;
  esac
}

is_preempted() {
  [[ $(scontrol show job "$job") == *" PreemptTime="[0-9]* ]]
}

requeue() {
  scontrol requeue "$job" || true # it says why not, as after --no-requeue: the exit code is still the run's
}
