#!/bin/sh
# The launcher under the name that it has in Pai-Megatron-Patch: the same positions and flags. See docs/launcher.md.
exec sh "$(dirname -- "$0")/run_mcore_llama.sh" "$@"
