#!/bin/sh
# LLaMA 1 of 13B on 64 nodes of 8 GPUs, with the name and the values of Megatron-LLaMA's script. It calls sbatch:
#
#   DATASET=... TOKENIZER_PATH=... SAVE_CHECKPOINT_PATH=... sh examples/LLaMA/LLaMA_13_slurm.sh [flags]
#
# Edit the values below or give others in the environment; flags on the line come last, and win. Options of sbatch
# have environment variables of their own (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT).
set -eu

# Prefixes of .bin/.idx: one, or several with weights, '0.2 A 0.3 B 0.5 C'.
DATASET=${DATASET:?the prefix of .bin/.idx, or weights and prefixes}
export TOKENIZER_PATH="${TOKENIZER_PATH:?a folder with a tokenizer, or its name on the hub}"
# The run's folder, on a disk that all nodes share. The same command again resumes it.
SAVE_CHECKPOINT_PATH=${SAVE_CHECKPOINT_PATH:?the folder of the run}
# A Hugging Face folder to start from; none: random weights.
LOAD_CHECKPOINT_PATH=${LOAD_CHECKPOINT_PATH:-none}

MODEL_SIZE=${MODEL_SIZE:-llama1-13B}
NODES=${NODES:-64}
TP_SIZE=${TP_SIZE:-2}
PP_SIZE=${PP_SIZE:-1}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-4}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-2048}
tokens_per_step=$((GLOBAL_BATCH_SIZE * 2048))

# After ENV the positions of run_mcore_llama.sh: docs/launcher.md.
exec sbatch --job-name megatron_llama_13b --nodes "$NODES" "$(dirname -- "$0")/../llama3_1/slurm.sh" \
    slurm "$MODEL_SIZE" "$MICRO_BATCH_SIZE" "$GLOBAL_BATCH_SIZE" 6e-5 6e-6 2048 2048 bf16 "$TP_SIZE" "$PP_SIZE" 1 \
    true true true false sel false 100 "$DATASET" none "$LOAD_CHECKPOINT_PATH" $((1000 * tokens_per_step)) \
    $((5 * tokens_per_step)) "$SAVE_CHECKPOINT_PATH" --init-method-std 0.01 --overlapped-distributed-optimizer \
    --reduce-bucket-size 4e8 --split 98,2,0 --eval-interval 1000 --eval-iters 10 "$@"
