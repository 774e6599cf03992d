#!/bin/sh
# LLaMA 1 of 13B on one machine of 8 GPUs, with the name and the values of Megatron-LLaMA's script:
#
#   DATASET=... TOKENIZER_PATH=... SAVE_CHECKPOINT_PATH=... sh examples/LLaMA/LLaMA_13_standalone.sh [flags]
#
# Edit the values below or give others in the environment; flags on the line come last, and win.
set -eu

# Prefixes of .bin/.idx: one, or several with weights, '0.2 A 0.3 B 0.5 C'.
DATASET=${DATASET:?the prefix of .bin/.idx, or weights and prefixes}
TOKENIZER_PATH=${TOKENIZER_PATH:?a folder with a tokenizer, or its name on the hub}
# The run's folder. The same command again resumes it.
SAVE_CHECKPOINT_PATH=${SAVE_CHECKPOINT_PATH:?the folder of the run}
# A Hugging Face folder to start from; none: random weights.
LOAD_CHECKPOINT_PATH=${LOAD_CHECKPOINT_PATH:-none}

MODEL_SIZE=${MODEL_SIZE:-llama1-13B}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP_SIZE=${TP_SIZE:-2}
PP_SIZE=${PP_SIZE:-1}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-2}
REPLICAS=$((GPUS_PER_NODE / (TP_SIZE * PP_SIZE)))
# 8 steps of gradient accumulation.
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((REPLICAS * MICRO_BATCH_SIZE * 8))}

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --model-size "$MODEL_SIZE" --seq-length 2048 --init-method-std 0.01 --load "$LOAD_CHECKPOINT_PATH" \
    --nproc-per-node "$GPUS_PER_NODE" --sequence-parallel --tensor-model-parallel-size "$TP_SIZE" \
    --pipeline-model-parallel-size "$PP_SIZE" --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters 1000 --lr 6e-5 \
    --min-lr 6e-6 --lr-warmup-iters 5 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1 --weight-decay 0.1 \
    --overlapped-distributed-optimizer --reduce-bucket-size 2e8 --train-data-path "$DATASET" --split 98,2,0 \
    --eval-interval 1000 --eval-iters 10 --save-interval 100 --output-path "$SAVE_CHECKPOINT_PATH" --precision bf16 \
    --recompute-granularity selective "$@"
