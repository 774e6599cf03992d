#!/usr/bin/env bash
# Trains on many nodes under SLURM, and resumes by itself after time limits and lost nodes:
#
#     sbatch examples/llama3_1/slurm.sh slurm MODEL_SIZE ... OUTPUT_BASEPATH --max-restarts 10 [flags]
#
# The arguments are those of run_mcore_llama.sh, with ENV slurm. Edit the lines below, or give other values as
# options of sbatch before the script's name.
#
# All nodes, spares included: 9 for a run that needs 8, with --min-nodes 8. A range (8-9) also starts with fewer, but
# not together with --ntasks-per-node here.
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# All launchers get SIGUSR1 this many seconds before the limit. A step and a checkpoint must fit into this time.
# Without "B:" SLURM signals the job's steps. The batch shell sees their exit code and need not forward a signal.
#SBATCH --signal=USR1@300
# If a node is lost, the other nodes keep their allocation. If it is the first node, they request the requeue.
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --job-name=llama3_1
set -uo pipefail

export num_positions=25
refuse() {
    echo "$1" >&2
    echo "usage: sbatch [options] slurm.sh slurm MODEL_SIZE ... OUTPUT_BASEPATH [flags], as run_mcore_llama.sh" >&2
    exit 2
}
[ -n "${SLURM_JOB_ID:-}" ] || refuse "environment variable SLURM_JOB_ID is not set: start this script with sbatch"
[ "${1:-}" = slurm ] || refuse "position 1 (ENV): got '${1:-}', expected slurm"
[ $# -ge $num_positions ] || refuse "got $# arguments, expected at least the $num_positions positions"

output="${*:num_positions:1}"
# On a shared disk: a folder for each attempt with a log of each node, and a folder with a log of each rank.
all_logs="$output/log/slurm/$SLURM_JOB_ID"
export ATTEMPT_LOGS="$all_logs/attempt_${SLURM_RESTART_COUNT:-0}" RANK_LOGS="$all_logs/ranks"
mkdir -p "$ATTEMPT_LOGS" || exit 2

# SLURM runs a copy of this file; the original is beside the launcher. Its path may have spaces.
original="$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')"
original="${original%% slurm *}" # the arguments are shown too
LAUNCHER="$(dirname "$original")/run_mcore_llama.sh"
FIRST_NODE="${SLURMD_NODENAME:-$(hostname -s)}"
export LAUNCHER FIRST_NODE

# Runs the launcher on each node. The exit code of the first node's launcher is the run's.
run_node() {
    local code=0
    run_launcher "$@" || code=$?
    echo "node $SLURMD_NODENAME ended with exit code $code" >&2
    if [ "$SLURM_PROCID" = 0 ]; then
        echo "$code" > "$ATTEMPT_LOGS/exit_code"
    elif [ $code != 0 ] && ! first_node_answers; then
        echo "$FIRST_NODE does not answer, and with it the batch script is lost: this node asks for the requeue" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return $code
}

# The launcher saves a checkpoint after a signal. With cgroups SLURM sends it to this shell alone, which forwards it;
# otherwise to all processes, and this shell must not end before the launcher.
run_launcher() {
    local code name waited
    # The user's own --log-dir comes later, and wins.
    bash "$LAUNCHER" "${@:1:num_positions}" --log-dir "$RANK_LOGS" "${@:num_positions+1}" &
    launcher=$!
    for name in TERM USR1 USR2; do
        # shellcheck disable=SC2064 # expands the name now
        trap "signalled=yes; kill -s $name $launcher 2> /dev/null" $name
    done
    signalled=yes
    while [ -n "$signalled" ]; do # a signal interrupts the wait
        signalled=
        wait $launcher
        waited=$?
        [ $waited = 127 ] || code=$waited
    done
    return "$code"
}

# Whether the slurmd of the first node, where this script runs, can be reached.
first_node_answers() {
    local node config address port
    node="$(scontrol show node "$FIRST_NODE")"
    config="$(scontrol show config)"
    address="$(sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' <<< "$node")"
    port="$(sed -n 's/.* Port=\([0-9]*\).*/\1/p' <<< " $node")"
    port="${port:-$(sed -n 's/^SlurmdPort *= *\([0-9]*\)$/\1/p' <<< "$config")}"
    timeout 30 bash -c ": < /dev/tcp/$address/$port" 2> /dev/null
}

# The step of the last checkpoint, on the disk or at --save URL.
progress() { cat "$output/log/last_saved_iteration.txt" 2> /dev/null; }
export -f run_node run_launcher first_node_answers

before="$(progress)"
echo "attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, after step ${before:-0}; logs in $ATTEMPT_LOGS"
# One task a node: the launcher, which starts a process for each GPU and binds it.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
    --output="$ATTEMPT_LOGS/%N.%t.log" bash -c 'run_node "$@"' run_node "$@"
code=$?
# srun's code is the highest of all nodes, including a node that was lost while the other nodes went on.
[ -s "$ATTEMPT_LOGS/exit_code" ] && code="$(< "$ATTEMPT_LOGS/exit_code")"

# Done (0), wrong input (2, 3), bad checkpoint (4), stopped by a person (130: STOP, 143: scancel): the end.
# So is a store that is away for longer than its driver tries (2 or 4).
case $code in 0 | 2 | 3 | 4 | 130 | 143) exit "$code" ;; esac

# Other codes get another attempt, but not for ever: the limit (75, 138), a hang or lost machines (5), a crash.
after="$(progress)"
in_vain=0
[ "$before" != "$after" ] || in_vain=$(($(cat "$all_logs/in_vain" 2> /dev/null || echo 0) + 1))
echo "$in_vain" > "$all_logs/in_vain"
if [ $in_vain -ge 2 ]; then
    echo "exit code $code; two attempts in a row have not saved a checkpoint: not repeated" >&2
    exit "$code"
fi
echo "exit code $code after step ${after:-0}: requeued"
scontrol requeue "$SLURM_JOB_ID"
