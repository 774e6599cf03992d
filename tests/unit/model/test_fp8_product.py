"""Layers with 8-bit products: against plain torch on rounded factors, and in a whole model.

Cut over TP: test_overlapped_linear.py. Losses beside those in fp32: training/test_covered_layouts.py.
"""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run, build_stages, saved_for_backward
from triton_interpreter import give_writer

from patch.amax import noted_amax
from patch.config.choices import Fp8Format
from patch.model.fp8 import matrix as fp8_matrix
from patch.model.fp8.product import Fp8Product, StepWeights
from patch.model.linear import Column, Row
from patch.model.mlp import swiglu
from patch.optimizer.buckets.main_grad import DummyWgrads, MainGrad
from patch.training.evaluation import evaluate
from patch.training.step import train_step

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
GRADIENT = {"hybrid": E5M2, "e4m3": E4M3}
FORMS: list[Fp8Format] = ["hybrid", "e4m3"]
SUM_BOUND = 1e-5
"""Relative to the largest number: sums of at most 70 float32 numbers in another order."""


def product_of(form: Fp8Format, *, keeps_input: bool = False) -> Fp8Product:
    """A layer's product on one rank."""
    return Fp8Product(StepWeights(form), keeps_input=keeps_input).of(None)


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 matrix of numbers that 8 bits hold beside the largest of the matrix."""
    largest = matrix.abs().max()
    scale = torch.exp2(torch.floor(torch.log2(LARGEST[dtype] / largest.double()))).float()
    return (matrix * scale).to(dtype).float() / scale


def quantize_operands(form: Fp8Format, tokens: int = 21) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input [tokens / 3, 3, 32], weight [48, 32] and gradient of the output, with rows of different size."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        sizes = torch.exp2(4 * torch.randn(*shape[:-1], 1, generator=generator))
        return torch.randn(*shape, generator=generator) * sizes

    return numbers(tokens // 3, 3, 32), numbers(48, 32), numbers(tokens // 3, 3, 48)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keeps_input", [False, True])
def test_output_and_gradients_are_products_of_rounded_factors(form: Fp8Format, keeps_input: bool) -> None:
    x, w, g = quantize_operands(form)
    x.requires_grad_(), w.requires_grad_()
    output = product_of(form, keeps_input=keeps_input)(x, w)
    output.backward(g.permute(0, 2, 1).contiguous().permute(0, 2, 1))

    x2, g2, kind = x.detach().flatten(0, 1), g.flatten(0, 1), GRADIENT[form]
    expected = {
        "output": rounded(x2, E4M3) @ rounded(w.detach(), E4M3).t(),
        "input": rounded(g2, kind) @ rounded(w.detach(), E4M3),
        "weight": rounded(g2, kind).t() @ rounded(x2, E4M3),
    }
    ours = {"output": output.flatten(0, 1), "input": x.grad.flatten(0, 1), "weight": w.grad}
    for name, found in ours.items():
        bound = SUM_BOUND * expected[name].abs().max().item()
        assert (found - expected[name]).abs().max() <= bound, name


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_added_up_without_being_rounded(form: Fp8Format) -> None:
    """Where the optimizer says, over whatever was there; against float64."""
    x, w, g = (numbers.bfloat16() for numbers in quantize_operands(form))
    total, expected = torch.full(w.shape, torch.nan), torch.zeros(w.shape).double()
    give_writer(w.requires_grad_(), total)
    for gradient in (g, g.flip(0)):
        product_of(form)(x, w).backward(gradient)
        pair = (gradient, GRADIENT[form]), (x, E4M3)
        a, b = (rounded(matrix.flatten(0, 1).float(), kind).double() for matrix, kind in pair)
        expected += a.t() @ b
    assert not w.grad.any(), "a stand-in"
    assert (total - expected).norm() <= 1e-6 * expected.norm()


def test_the_stand_in_of_a_weight_in_8_bits_is_known_by_its_hook() -> None:
    """autograd has made no copy of it, which would be added like any gradient."""
    weight, total = torch.nn.Parameter(torch.ones(48, 32).to(E4M3)), torch.full((48, 32), torch.nan)
    weight.grad_dtype, weight.scale_inv = torch.bfloat16, torch.ones(())
    main_grad = MainGrad(weight, DummyWgrads(), lambda: (total, True))
    product_of("hybrid")(torch.ones(16, 1, 32).bfloat16(), weight).sum().backward()
    assert main_grad.take_note(weight.grad) and (total == 16).all()


def test_what_is_kept_for_backward() -> None:
    """8 bits a number instead of 16; nothing for a frozen weight or without backward."""
    form: Fp8Format = "hybrid"
    x, w, _ = quantize_operands(form, 96)
    kept = {}
    for name in ("8 bits", "input", "frozen"):
        trains, product = name != "frozen", product_of(form, keeps_input=name == "input")
        input, weight = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(trains)
        saved: dict[int, Any] = {}
        with saved_for_backward(saved):
            output = product(input, weight)
        kept[name] = sum(s.nbytes() for key, s in saved.items() if key != weight.untyped_storage()._cdata)
        output.sum().backward()
        assert (weight.grad is not None) == trains and input.grad is not None
    assert kept == {"8 bits": x.numel() + 4, "input": 2 * x.numel(), "frozen": 0}


def test_a_part_that_needs_no_gradient_is_left_out_and_no_tokens_are_a_sum_of_nothing() -> None:
    x, w, _ = quantize_operands("hybrid")
    product_of("hybrid")(x, w.requires_grad_()).sum().backward()
    assert x.grad is None and w.grad.isfinite().all()
    none, w.grad = torch.zeros(0, 3, 32, requires_grad=True), None
    output = product_of("hybrid")(none, w)
    output.sum().backward()
    assert output.shape == (0, 3, 48) and none.grad.shape == none.shape and not w.grad.any()


def test_what_is_kept_of_weights_and_how_long() -> None:
    torch.manual_seed(0)
    w = (torch.randn(48, 32) * torch.exp2(4 * torch.randn(48, 1))).bfloat16()
    step = StepWeights(keeps_weights=True)
    weight = step.new()
    assert weight.rows(w).values is not weight.rows(w).values
    with step.unchanged():
        rows, columns = weight.rows(w), weight.columns(w)
        assert weight.rows(w) is rows and weight.columns(w) is columns
        assert rows.values.nbytes == columns.values.nbytes == w.numel()  # what the plan counts
        expected = fp8_matrix.quantize_operands(w, E4M3)
        for ours, theirs in zip((rows, columns), expected, strict=True):
            assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
            assert torch.equal(ours.scale_inv, theirs.scale_inv)
    assert weight.rows(w) is not rows
    with pytest.raises(KeyError), step.unchanged():
        weight.rows(w)
        raise KeyError
    assert not torch.equal(weight.rows(w * 3).values.float(), rows.values.float())
    with (scales_only := StepWeights()).unchanged():
        weight = scales_only.new()
        assert weight.rows(w).values is not weight.rows(w).values
        assert weight.rows(w).scale_inv is weight.rows(w).scale_inv


def _layers_in_8_bits(**layout: int) -> list[int]:
    """The layers of this rank with 8-bit products, by number; all four linear layers or none."""
    config = small_run(
        precision="fp8", first_last_layers_bf16=True, num_layers_at_end_in_bf16=2, num_layers=8, **layout
    )
    _, stages = build_stages(config)
    found = []
    for layer in (layer for stage in stages for layer in stage.decoder.layers):
        kinds = [isinstance(m.product, Fp8Product) for m in layer.modules() if isinstance(m, Column | Row)]
        assert len(kinds) == 4 and sum(kinds) in (0, 4)
        found += [layer.layer_number] if any(kinds) else []
    new_job()
    return found


def _check_kept_weights() -> None:
    """Steps and an evaluation with 8-bit weights of a step are, to the bit, those with weights made anew.

    Updated weights arrive while the next step has begun: each bucket is a fraction of a layer.
    """
    found = []
    for is_off in (False, True):
        config = small_run(
            dp=2, num_layers=2, precision="fp8", micro_batch_size=1, global_batch_size=4, train_iters=3,
            lr=5e-3, data_parallel_sharding="gradients", reduce_bucket_size=3000,
            recompute_granularity="full", disable_parameter_transpose_cache=is_off,
        )  # fmt: skip
        assert config.casts.are_kept != is_off
        run = build_seeded_run(config)
        steps = [train_step(run, iteration) for iteration in range(2)]
        run.data.valid_readers = {"valid": run.data.train_reader}
        found.append(([(r.loss, r.grad_norm) for r in steps], evaluate(run), train_step(run, 2).loss))
        run.optimizer.finish_param_sync()
        new_job()
    assert found[0] == found[1]


def _check_noted_numbers(casts: int, **changes: Any) -> None:
    """So many casts of what SwiGLU wrote need no search, which would find what is noted."""
    found: list[bool] = []

    def noted(matrix: torch.Tensor) -> torch.Tensor | None:
        amax = noted_amax(matrix)
        found.extend([] if amax is None else [torch.equal(amax, matrix.abs().max().float())])
        return amax

    run = build_seeded_run(small_run(precision="fp8", train_iters=1, **changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_matrix, "noted_amax", noted)
        train_step(run, 0)
    layers = sum(len(stage.decoder.layers) for stage in run.stages)
    assert found == [True] * casts * layers * run.config.num_micro_batches, changes
    run.optimizer.finish_param_sync()
    new_job()


def test_swiglu_notes_nothing_where_changes_are_not_counted() -> None:
    """In `torch.inference_mode`, as a program may call a model."""
    with torch.inference_mode():
        assert noted_amax(swiglu(torch.ones(16, 64), is_fused=False, notes_amax=True)) is None


def run_two(rank: int, world_size: int) -> list[list[int]]:
    _check_kept_weights()
    _check_noted_numbers(3, tp=2, sequence_parallel=True, recompute_granularity="selective")
    _check_noted_numbers(3, pp=2, stage=1, recompute_granularity="full")
    _check_noted_numbers(2, dp=2, lora_rank=4)
    return [_layers_in_8_bits(pp=2), _layers_in_8_bits(pp=2, stage=2)]


@pytest.mark.long
def test_kept_weights_and_noted_numbers_change_no_bit_and_some_layers_stay_in_bf16() -> None:
    assert run_distributed(run_two, 2) == [[[2, 3, 4], [2, 5, 6]], [[5, 6], [3, 4]]]
