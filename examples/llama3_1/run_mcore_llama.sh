#!/bin/sh
# sh run_mcore_llama.sh ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]: see docs/launcher.md, or --help.
# It only finds Python: $PYTHON, else the repository's .venv, else python3. Any POSIX shell runs it.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
own=$here/../../.venv/bin/python
[ -x "$own" ] || own=python3
exec "${PYTHON:-$own}" "$here/pretrain_llama.py" "$@"
