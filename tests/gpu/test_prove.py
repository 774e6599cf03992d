"""A run that is proved on one GPU: its kernels, recomputation and offload against one plain process."""

import pytest

from toolkits.prove.__main__ import main

RUN = "--model-size 8B --sft --dataset-type raw --packing --precision bf16 --recompute-granularity full"


def test_a_run_on_one_gpu_is_proved(capsys: pytest.CaptureFixture) -> None:
    run = f"{RUN} --optimizer-offload-policy static --optimizer-offload-fraction 0.5 --nproc-per-node 1"
    assert main(["--", *run.split()]) == 0
    assert capsys.readouterr().out.count("(bound") == 14
