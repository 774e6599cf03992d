#!/bin/sh
# Fine-tune Mistral 7B on chats. 1 machine of 8 H100: planned, 48.7 GiB of a GPU.
#
#   MODEL=/models/Mistral-7B-Instruct-v0.3 DATA=chats.json RUN=runs/mistral sh examples/mistral/sft_7b.sh [flags]
#
# Flags on the line come last, and win (--dry-run). The shape is that of MODEL's config.json.
set -eu

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --load "${MODEL:?a Hugging Face folder, or its name on the hub}" \
    --train-data-path "${DATA:?chats in JSON}" --output-path "${RUN:?the folder of the run}" \
    --sft --dataset-type raw --packing --precision bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 \
    --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 50 --train-epochs 2 --save-interval 200 --export-hf \
    --overlapped-distributed-optimizer "$@"
