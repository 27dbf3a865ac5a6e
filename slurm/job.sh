# What the job scripts share: where a job runs, over how many processes, and what is done when it ends.
# shellcheck shell=bash disable=SC2034 # some of it the scripts alone use

: "${scripts:?is set by the script that reads this}"
checkout=$(cd "$scripts/.." && pwd)
again=("$BASH" "$0" "$@")
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:?is not set; submit this by sbatch}} # the SLURM_JOB_ID of an array's last task means all tasks of the array
details=$(scontrol --details show job "$job" 2> /dev/null) || details=""

refuse() {
  echo "error: $1" >&2
  exit 2
}

# Where nobody has chosen an --output, what a job prints is beside its run; before that place is known, in a file of its own.
printed=""
if [[ /dev/stdout -ef /dev/null ]]; then
  printed=$(mktemp)
  exec > "$printed"
  [[ ! /dev/stderr -ef /dev/null ]] || exec 2>&1
fi
open_log() {
  local place
  trap - EXIT
  mkdir -p runs 2> /dev/null || true
  for place in "$PWD/runs" "$PWD" "${HOME:-/tmp}" /tmp; do [[ ! -w $place ]] || break; done
  failures=$place/slurm-$job.failures
  [[ -n $printed ]] || return 0
  exec >> "$place/slurm-$job.out"
  [[ ! /dev/stderr -ef $printed ]] || exec 2>&1
  cat "$printed"
  rm "$printed"
  [[ $details == *" Comment="* ]] || scontrol update JobId="$job" Comment="log: $place/slurm-$job.out" 2> /dev/null || true
}
trap open_log EXIT

# what slurm/site.sh may set otherwise
python=()
workdir=$PWD # where runs/ goes: the folder of sbatch, or its --chdir
srun_options=()
torchrun_options=() # --max-restarts=3 starts processes again before the job is
max_failures=3 # after which a job is not started again
min_nodes=1 # a job that lost a node goes on inside its allocation with so many at least
if [[ -e $checkout/slurm/site.sh ]]; then
  set +u # modules and conda read variables that are not set
  # shellcheck source=slurm/site.example.sh
  source "$checkout/slurm/site.sh"
  set -u
fi
mkdir -p "$workdir" && cd "$workdir" || exit
open_log
train=$checkout/train.py
[[ ! $PWD -ef $checkout ]] || train=train.py
export PYTHONPATH=$checkout/src${PYTHONPATH:+:$PYTHONPATH} # the code of this checkout, whichever one was installed

choice="python of slurm/site.sh"
if ((!${#python[@]})); then
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    python=("$VIRTUAL_ENV/bin/python") choice="the virtual environment active when sbatch ran"
  elif [[ -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
    python=("$CONDA_PREFIX/bin/python") choice="the conda environment active when sbatch ran"
  elif [[ -x $checkout/.venv/bin/python ]]; then
    python=("$checkout/.venv/bin/python") choice=".venv of the checkout"
  else
    python=(python) choice="the first in PATH"
  fi
fi
found=$(type -P "${python[0]}" || type -t "${python[0]}") || refuse "found no ${python[0]}, $choice; set python=(/path/to/python) in slurm/site.sh"
echo "python     $found${python[1]+ ${python[*]:1}} ($choice)"

# count GPUS: 3 of a100:1,h100:2
count() {
  local kind sum=0
  for kind in ${1//,/ }; do
    kind=${kind##*:}
    [[ $kind =~ ^[0-9]+$ ]] || kind=1
    sum=$((sum + kind))
  done
  echo "$sum"
}

# per_node: the GPUs of each group of nodes, as in "2 on node[1-3]"
per_node() {
  local nodes gres
  sed -nE 's/\([^)]*\)//g; s/^ *Nodes=(\S+) .*GRES=(\S*)$/\1 \2/p' <<< "$details" | while read -r nodes gres; do
    echo "$(count "$(tr ',' '\n' <<< "$gres" | grep '^gpu:')") on $nodes"
  done
}

((${SLURM_HET_SIZE:-1} == 1)) || refuse "found a job of $SLURM_HET_SIZE components, but a run needs one; submit it without \":\""
# asked of each node by --gpus-per-node or --gres, the more of both where there are two; an exclusive node gives all it has
asked=$(sed -nE 's/^ *TresPerNode=//p' <<< "$details" | tr ',' '\n' | sed '/gpu/!d' | paste -s -d ,)
gpus_per_node=$(count "${SLURM_GPUS_PER_NODE:-}")
by_gres=$(($(count "$asked") - gpus_per_node))
((by_gres <= gpus_per_node)) || gpus_per_node=$by_gres
if ((!gpus_per_node)) && [[ -z ${SLURM_GPUS_PER_NODE:-} ]]; then
  gpus_per_node=${SLURM_GPUS_ON_NODE:-0}
  given=$(per_node)
  [[ $(cut -d ' ' -f 1 <<< "$given" | sort -u | wc -l) == 1 ]] ||
    refuse "found GPUs ${given//$'\n'/, }, but each node must have the same number; \
use --gpus-per-node=N, or --constraint"
fi
[[ -z ${SLURM_GPUS:-} ]] || (($(count "$SLURM_GPUS") == gpus_per_node * SLURM_NNODES)) ||
  refuse "found --gpus=$SLURM_GPUS over $SLURM_NNODES nodes, but each node must have the same number; \
use --gpus-per-node=N"
((${SLURM_NTASKS:-0} % SLURM_NNODES == 0)) ||
  refuse "found $SLURM_NTASKS tasks on $SLURM_NNODES nodes, but each node must have the same number; \
use --ntasks-per-node=N"

((gpus_per_node)) || gpus_per_node=""
tasks_per_node=${SLURM_NTASKS:+$((SLURM_NTASKS / SLURM_NNODES))}
tasks_per_node=${tasks_per_node:-${gpus_per_node:-1}}
cpus_per_node=$(tr ',' '\n' <<< "${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}" | sed 's/(.*//' | sort -n | head -n 1)
cpus_per_task=${SLURM_CPUS_PER_TASK:-$((cpus_per_node > tasks_per_node ? cpus_per_node / tasks_per_node : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}

# each task sees all GPUs of its node and takes its own; a step of an exclusive job gets none unless it asks
unset SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU
unset SLURM_EXPORT_ENV # sbatch --export=NONE is for this script: the tasks need what it has exported
srun_options+=(${gpus_per_node:+"--gpus-per-node=$gpus_per_node"} --kill-on-bad-exit=1)
srun_options+=(--wait=30) # ranks end together: one that stays is on a node that was lost, and srun would wait for ever

has_lost_nodes=$((SLURM_NNODES < ${SLURM_JOB_NUM_NODES:-$SLURM_NNODES}))
# --overlap: Slurm may hold the step that failed, and its GPUs, for as long as the job lasts
((!has_lost_nodes)) || srun_options+=(--nodelist="$SLURM_JOB_NODELIST" --overlap)

# until Python listens, a signal would kill it
block_signals=(env --block-signal=USR1 --block-signal=USR2)
"${block_signals[@]}" true 2> /dev/null || block_signals=()

# launch TASKS COMMAND...: so many on every node of the job
launch() {
  local code=0
  watch_over_script > /dev/null 2>&1 &
  srun --nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES * $1))" --ntasks-per-node="$1" \
    --cpus-per-task="$((cpus_per_task * tasks_per_node / $1))" "${srun_options[@]}" "${block_signals[@]}" "${@:2}" || code=$?
  kill $! 2> /dev/null || true
  go_on_without_lost_nodes "$code"
  requeue_after "$code"
  exit "$code"
}

# Have another node requeue the job once Slurm has taken this one from it, and this script with it: by --no-kill, the job
# would stay there with nothing to run until its time limit.
watch_over_script() {
  # shellcheck disable=SC2016 # the other node expands it
  local other watch='while read -r host nodes < <(squeue --noheader --job="$1" --format="%B %N")
    [[ -z $nodes ]] || scontrol show hostnames "$nodes" | grep --quiet --line-regexp "$host"; do sleep 20; done
    scontrol requeue "$1" || scancel "$1"'
  other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep --invert-match --line-regexp "$SLURMD_NODENAME" | head -n 1)
  [[ -z $other ]] || exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$other" --gpus-per-node=0 --mem=0 \
    "${block_signals[@]}" bash -c "$watch" watch "$job"
}

# Start this script again on the nodes that answer, if some don't: by --no-kill, Slurm leaves them to the job.
go_on_without_lost_nodes() {
  local node alive=() lost=()
  [[ $1 != @(0|2|75|130) ]] && ((SLURM_NNODES > 1)) && ! is_preempted || return 0
  answers "$SLURMD_NODENAME" || return 0 # this one is there: a Slurm that can't ask it says nothing of the others
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    if answers "$node"; then alive+=("$node"); else lost+=("$node"); fi
  done
  ((${#lost[@]} && ${#alive[@]} >= min_nodes)) || return 0
  echo "lost       ${lost[*]}: continues with ${#alive[@]} of $SLURM_NNODES nodes" >&2
  unset SLURM_GPUS
  SLURM_NNODES=${#alive[@]} SLURM_NTASKS=$((${#alive[@]} * tasks_per_node))
  SLURM_JOB_NODELIST=$(IFS=, && echo "${alive[*]}")
  exec "${again[@]}"
}

# answers NODE: whether its slurmd can start a task
answers() {
  timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --gpus-per-node=0 --mem=0 true 2> /dev/null
}

# a run that was given notice requeues its job by itself; here are left those that were not, or have no scontrol
requeue_after() {
  local count
  if (($1 == 2 && has_lost_nodes)); then
    requeue # it can't train on the nodes that were left
    return
  fi
  case $1 in
    0 | 2 | 130) rm -f "$failures" || true ;; # 2: a mistake in the command, which would be made again; 130: Ctrl+C
    75) requeue ;; # it was given notice by SIGUSR1 or SIGUSR2, and has no scontrol in its container
    *)
      if is_preempted; then
        requeue
        return
      fi
      if [[ $details == *" Requeue=0 "* ]]; then
        echo "failed with exit code $1: not requeued, because of --no-requeue" >&2
        return
      fi
      if { echo "exit code $1" >> "$failures"; } 2> /dev/null; then
        count=$(wc -l < "$failures")
      else # where nothing can be written: of all starts
        count=$((${SLURM_RESTART_COUNT:-0} + 1))
      fi
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
