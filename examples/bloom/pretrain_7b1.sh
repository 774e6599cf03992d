#!/bin/sh
# Continue the pre-training of BLOOM 7B1. 1 machine of 8 H100: planned, 48.8 GiB of a GPU.
#
#   MODEL=/models/bloom-7b1 DATA=/data/corpus RUN=runs/bloom sh examples/bloom/pretrain_7b1.sh [flags]
#
# Flags on the line come last, and win (--dry-run). DATA is the prefix of .bin and .idx: docs/pretraining.md.
set -eu

exec sh "$(dirname -- "$0")/../llama3_1/run_mcore_llama.sh" \
    --model-size bloom-7b1 --load "${MODEL:?a Hugging Face folder, or its name on the hub}" \
    --train-data-path "${DATA:?the prefix of .bin and .idx}" --output-path "${RUN:?the folder of the run}" \
    --dataset-type idxmap --seq-length 2048 --micro-batch-size 2 --global-batch-size 512 --precision bf16 \
    --lr 1.2e-5 --min-lr 1.2e-6 --lr-warmup-iters 100 --train-iters 10000 --save-interval 1000 --export-hf \
    --overlapped-distributed-optimizer "$@"
