#!/bin/sh
# Takes the positions of Pai-Megatron-Patch's LLaMA-3.1 converter, for users who migrate, and calls toolkits.convert.
#
#   sh hf2mcore_convertor_llama3_1.sh SIZE SOURCE TARGET TP PP MG2HF CHECK CHECK_ONLY PR [HF_CKPT_PATH]
#
# SIZE, TP, PP: not used. MG2HF: true converts back; SOURCE is then the checkpoint. CHECK: true verifies the result.
# CHECK_ONLY: true only verifies an earlier conversion. PR: fp32, bf16 or fp16, the type to convert to and to verify
# in. HF_CKPT_PATH: with MG2HF=true, the Hugging Face folder that describes the model.
set -eu

if [ $# -lt 9 ] || [ $# -gt 10 ]; then
    sed -n '2,8s/^# \{0,3\}//p' "$0" >&2
    exit 2
fi
source_folder=$2 target=$3 mg2hf=$6 check=$7 check_only=$8 precision=$9 hf_folder=${10:-}
for value in "$mg2hf" "$check" "$check_only"; do
    if [ "$value" != true ] && [ "$value" != false ]; then
        echo "ERROR MG2HF, CHECK and CHECK_ONLY: got $value, expected true or false" >&2
        exit 2
    fi
done
if [ "$mg2hf" = true ] && [ -z "$hf_folder" ]; then
    echo "ERROR HF_CKPT_PATH (position 10) is missing: with MG2HF=true it describes the model" >&2
    exit 2
fi
echo "SIZE, TP and PP are not needed: config.json has the shape, and the checkpoint loads at any TP and PP" >&2

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
own=$root/.venv/bin/python
[ -x "$own" ] || own=python3
python=${PYTHON:-$own}
if [ "$mg2hf" = true ]; then
    hf=$target mcore=$source_folder
    set -- mcore2hf --load "$source_folder" --save "$target" --hf-config "$hf_folder"
else
    hf=$source_folder mcore=$target
    set -- hf2mcore --load "$source_folder" --save "$target" --params-dtype "$precision"
fi
if [ "$check_only" = false ]; then
    "$python" -m toolkits.convert "$@"
fi
if [ "$check" = true ] || [ "$check_only" = true ]; then
    "$python" -m toolkits.verify_alignment --hf "$hf" --mcore "$mcore" --params-dtype "$precision"
fi
