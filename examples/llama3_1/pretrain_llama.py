"""Train a LLaMA from this repository without an installation; `toolkits.train` is the program.

`python pretrain_llama.py ENV MODEL_SIZE ... OUTPUT_BASEPATH [flags]`, or flags alone (see `--help`). torchrun
may start it too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from toolkits.train.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
