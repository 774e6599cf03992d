"""The contenders of the Adam benchmark do the same work: after one update all hold the same weights."""

import torch

from toolkits.benchmarks._adam_contenders import Tensors, contenders


def test_contenders_do_the_same_update():
    names = [(one.case, one.name) for one in contenders(Tensors(1))[0]]
    after = {}
    for index, (case, name) in enumerate(names):
        tensors = Tensors(5000)
        before = tensors.weight.clone()
        contenders(tensors)[0][index].update()
        after[case, name] = tensors.weight if case == "bf16" else tensors.master
        assert case != "bf16" or not torch.equal(tensors.weight, before), name
    for (case, _), weights in after.items():
        if case != "copy":
            torch.testing.assert_close(weights, after[case, "ours"], rtol=2**-7, atol=1e-7)
