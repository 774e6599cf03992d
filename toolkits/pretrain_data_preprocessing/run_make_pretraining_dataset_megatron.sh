#!/bin/sh
# Takes the positions of Pai-Megatron-Patch's script of this name, for users who migrate, and calls
# toolkits.preprocess_pretrain.
#
#   sh run_make_pretraining_dataset_megatron.sh INPUT TOKENIZER JSON_KEYS OUTPUT_FOLDER LOAD_FOLDER [NAME]
#
# INPUT: a file or folder of rows. TOKENIZER: Pai's word, such as LLama3Tokenizer; the tokenizer itself is the one in
# LOAD_FOLDER, and the word names the result as there: OUTPUT_FOLDER/mmap_llama3_datasets_KEY_document. JSON_KEYS: the
# keys of the texts, between blanks. NAME: instead of the word's, with GPT2BPETokenizer only.
set -eu

if [ $# -lt 5 ] || [ $# -gt 6 ]; then
    sed -n '2,9s/^# \{0,3\}//p' "$0" >&2
    exit 2
fi
input=$1 word=$2 keys=$3 output=$4 load=$5 name=${6:-}
if [ "$word" != GPT2BPETokenizer ] || [ -z "$name" ]; then
    name=$(printf %s "${word%Tokenizer}" | tr '[:upper:]' '[:lower:]')
fi

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
own=$root/.venv/bin/python
[ -x "$own" ] || own=python3
mkdir -p "$output"
# shellcheck disable=SC2086 # keys between blanks are several
exec "${PYTHON:-$own}" -m toolkits.preprocess_pretrain --input "$input" --output-prefix "$output/mmap_${name}_datasets" \
    --tokenizer-name-or-path "$load" --json-keys $keys
