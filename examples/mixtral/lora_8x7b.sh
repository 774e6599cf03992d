#!/bin/sh
# Train LoRA adapters beside Mixtral 8x7B. 1 machine of 8 H100: planned, 51.6 GiB of a GPU.
#
#   MODEL=/models/Mixtral-8x7B-Instruct-v0.1 DATA=chats.json RUN=runs/mixtral sh examples/mixtral/lora_8x7b.sh [flags]
#
# Flags on the line come last, and win (--dry-run). Adapters: docs/fine_tuning.md#adapters.
set -eu

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --model-size 8x7B --load "${MODEL:?a Hugging Face folder, or its name on the hub}" \
    --train-data-path "${DATA:?chats in JSON}" --output-path "${RUN:?the folder of the run}" \
    --sft --dataset-type raw --packing --precision bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 \
    --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 50 --train-epochs 2 --save-interval 200 --export-hf \
    --expert-model-parallel-size 8 --lora-rank 16 --lora-alpha 32 "$@"
