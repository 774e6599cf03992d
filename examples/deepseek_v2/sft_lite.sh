#!/bin/sh
# Fine-tune DeepSeek-V2-Lite on chats. 1 machine of 8 H100: planned, 51.1 GiB of a GPU.
#
#   MODEL=/models/DeepSeek-V2-Lite-Chat DATA=chats.json RUN=runs/deepseek sh examples/deepseek_v2/sft_lite.sh [flags]
#
# Flags on the line come last, and win (--dry-run). Sizes: docs/parallelism.md#experts.
set -eu

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --model-size deepseek-v2-lite --load "${MODEL:?a Hugging Face folder, or its name on the hub}" \
    --train-data-path "${DATA:?chats in JSON}" --output-path "${RUN:?the folder of the run}" \
    --sft --dataset-type raw --packing --precision bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 \
    --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --train-epochs 2 --save-interval 200 --export-hf \
    --expert-model-parallel-size 8 --overlapped-distributed-optimizer "$@"
