#!/bin/sh
# Fine-tune Qwen3-30B-A3B on chats. 1 machine of 8 H100: planned, 70.4 GiB of a GPU.
#
#   MODEL=/models/Qwen3-30B-A3B DATA=chats.json RUN=runs/qwen3 sh examples/qwen3/sft_30b_a3b.sh [flags]
#
# Flags on the line come last, and win (--dry-run). Sizes: docs/parallelism.md#experts.
set -eu

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --model-size 30B-A3B --load "${MODEL:?a Hugging Face folder, or its name on the hub}" \
    --train-data-path "${DATA:?chats in JSON}" --output-path "${RUN:?the folder of the run}" \
    --sft --dataset-type raw --packing --precision bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 \
    --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --train-epochs 2 --save-interval 200 --export-hf \
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
    --use-distributed-optimizer "$@"
