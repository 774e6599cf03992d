"""--precision-align against transformers: logits, loss and every weight gradient, to the bit.

TP=1 in one process and over two pipeline stages; TP=2 within a bound. Without the flag the same
comparisons find differences, so they can.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from megatron.core import parallel_state
from packed_runs import build_untrained
from small_runs import hf_llama, small_run
from training_runs import hf_gradients

from patch.config.schema import RunConfig
from patch.data import Batch
from patch.families import stacked_part
from patch.model.experts.layer import routers_of
from patch.training.setup import Run
from patch.training.step import run_schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = (
    "odd", "llama-3.1", "llama-1", "llama-3.2", "llama-yarn", "mistral-0.1", "mistral-nemo", "qwen-2",
    "qwen-3", "mixtral", "qwen-2-moe", "qwen-2-moe-mixed", "qwen-3-moe", "deepseek-v2-lite", "deepseek-v2",
    "moonlight", "deepseek-v3",
)  # fmt: skip
"""As many groups as heads, fewer, tied, scaled cosines, a window, a scale that is no power of two,
biases, norms of heads; experts with weights in float32, with a shared one and its gate, in some layers."""
ODD = {
    "num_layers": 2, "hidden_size": 60, "ffn_hidden_size": 90, "num_attention_heads": 6,
    "num_query_groups": 3, "kv_channels": 10, "vocab_size": 251,
}  # fmt: skip
"""No multiple of a vector's 8 or 16 numbers: ends of rows are computed one by one, with other bits."""
CASES = [
    *itertools.product(("odd", "llama-3.1"), DTYPES, ("eager", "sdpa")),
    *(("bloom", precision, "eager") for precision in DTYPES),
    *((name, *pair) for name in NAMES[2:] for pair in (("fp32", "sdpa"), ("bf16", "eager"))),
    ("mistral-0.1", "fp32", "eager"),
    ("mistral-0.1", "bf16", "sdpa"),
]
STAGED_LENGTH = 66
LONG = (2, 100)
"""Micro-batch and tokens."""
SHAPES = {"llama-3.1": [(1, 1), LONG], "mistral-0.1": [(2, 16), LONG]}
"""Of the families with more shapes than LONG: one token, and exactly a window."""
STAGED = [
    ("four-layers", "bf16", "sdpa", "interleaved"),
    ("mistral-nemo", "fp32", "eager", "none"),
    ("mistral-nemo", "bf16", "eager", "full"),
    ("mistral-nemo", "fp32", "sdpa", "selective"),
    ("llama-3.2", "fp32", "sdpa", "full"),
    ("llama-3.2", "bf16", "eager", "none"),
    ("qwen-2-moe", "bf16", "sdpa", "selective"),
    ("bloom", "fp32", "eager", "full"),
]
"""Cases over two processes, each with a recomputation of activations, or with two stages a process."""
CUT = [("mistral-nemo", "fp32", False), ("qwen-2", "fp32", True), ("qwen-3", "bf16", True)]
"""Cases over TP=2: family, precision and sequence parallelism."""


def _config(folder: Path, precision: str, align: str, tp: int = 1, pp: int = 1, **changes: Any) -> RunConfig:
    changes |= {"precision": precision, "precision_align": align, "max_padding_length": STAGED_LENGTH}
    return family_run(folder, tp, pp, **changes)


def _hf_model(folder: Path, precision: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision], attn_implementation=attention)
    hf.set_experts_implementation("eager")
    for parameter in hf.parameters():
        # Out of the mapped file: for one token MKL's bits depend on where in 64 bytes a weight begins.
        parameter.data = parameter.data.clone()
    return hf


def _batches(config: RunConfig, size: int, length: int, count: int = 2) -> list[Batch]:
    """Micro-batches; the first learns less than all of its tokens."""
    ids = torch.randint(0, config.model.vocab_size, (count, size, length + 1))
    mask = torch.ones(count, size, length)
    mask[0, :, : length // 3] = 0
    return [
        Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), learned)
        for rows, learned in zip(ids, mask, strict=True)
    ]


def _hf_step(hf: Any, batches: list[Batch]) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    """Logits of the first micro-batch, losses of all, and the gradients they leave."""
    hf.zero_grad()
    tokens = sum(batch.loss_mask.sum() for batch in batches)
    losses, logits = [], []
    for batch in batches:
        logits.append(hf(batch.tokens).logits)
        labels = torch.where(batch.loss_mask > 0, batch.labels, -100)
        loss = hf.loss_function(
            logits[-1], None, hf.config.vocab_size, shift_labels=labels, num_items_in_batch=tokens
        )
        loss.backward()
        losses.append(loss.item())
    return logits[0].detach(), losses, {name: weight.grad for name, weight in hf.named_parameters()}


def _our_step(run: Run, batches: list[Batch]) -> list[float]:
    """Losses (of the last stage) of a step of training; the gradients are in the parameters."""
    for stage in run.stages:
        stage.zero_grad()
    tokens = sum(batch.loss_mask.sum() for batch in batches).item()
    return [report["loss"].item() for report in run_schedule(run, batches, tokens, loss_scale=1.0)]


def _differences(run: Run, hf: Any, shape: tuple[int, int]) -> list[str]:
    """What is not equal to the bit: logits, losses, names of weights whose gradient differs."""
    batches = _batches(run.config, *shape)
    logits, losses, gradients = _hf_step(hf, batches)
    with torch.no_grad():
        ours = run.stages[0](batches[0].tokens, None, None)[..., : run.config.model.vocab_size]
    found = [] if torch.equal(ours, logits) else ["logits"]
    if _our_step(run, batches) != losses:
        found.append("losses")
    if any("_Choices" in type(router.router_replay).__name__ for router in routers_of(run.stages)):
        found.append("a router's replay stays")
    ours = hf_gradients(run.stages, run.config)
    assert len(_in_memory(ours)) == len(gradients)
    return found + [name for name in ours if not torch.equal(ours[name], _gradient_of(name, gradients))]


def _in_memory(names: Iterable[str]) -> set[str]:
    """transformers' names in memory of tensors of a folder."""
    return {getattr(stacked_part(name), "name", name) for name in names}


def _gradient_of(name: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' gradient of a tensor of a folder: its memory has all experts in one."""
    part = stacked_part(name)
    if part is None or part.expert is None:
        return gradients[name if part is None else part.name]
    of_expert = gradients[part.name][part.expert]
    return of_expert if part.name.endswith("down_proj") else of_expert.chunk(2)[part.part]


def run_one_process(rank: int, world_size: int, root: Path) -> dict[tuple, Any]:
    """Differences by case and shape, and those of the fast form."""
    found: dict[tuple, Any] = {}
    torch.manual_seed(0)
    for family, precision, align in CASES:
        hf = _hf_model(root / family, precision, align)
        for form in (align, "none") if (family, align) == ("llama-3.1", "eager") else (align,):
            run = build_untrained(_config(root / family, precision, form), root / family)
            for shape in SHAPES.get(family, [LONG]):
                found[family, precision, align, form, shape] = _differences(run, hf, shape)
            new_job()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of random weights for each family."""
    root = tmp_path_factory.mktemp("aligned")
    for family in ("bloom", *NAMES[1:]):
        family_model(family, root / family)
    hf_llama(small_run(**ODD), root / "odd")
    hf_llama(small_run(), root / "four-layers")
    return root


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[tuple, Any]:
    """What one process found."""
    return run_distributed(run_one_process, 1, root)[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_loss_and_gradients_equal_transformers(alone: dict, case: tuple) -> None:
    """The gradients of the fast form do not."""
    for shape in SHAPES.get(case[0], [LONG]):
        assert alone[*case, case[2], shape] == [], shape
    if (case[0], case[2]) == ("llama-3.1", "eager"):
        assert len(alone[*case, "none", LONG]) > 15


def run_two_processes(rank: int, world_size: int, root: Path) -> dict[tuple, Any]:
    """Over two stages the differences of this stage; over TP how near the results are."""
    found: dict[tuple, Any] = {}
    for family, precision, align, recompute in STAGED:
        hf = _hf_model(root / family, precision, align)
        changes = {"recompute_granularity": recompute}
        if recompute == "interleaved":
            changes = {"num_layers_per_virtual_pipeline_stage": 1}
        config = _config(root / family, precision, align, pp=2, **changes)
        found[family, precision, align, recompute] = _stage_differences(hf, root / family, config)
    for family, precision, is_sp in CUT:
        hf = _hf_model(root / family, precision, "eager")
        config = _config(root / family, precision, "eager", tp=2, sequence_parallel=is_sp)
        found[family, precision, is_sp] = _tp_nearness(hf, root / family, config)
    return found


def _stage_differences(hf: Any, folder: Path, config: RunConfig) -> tuple:
    """Our losses, theirs, names whose gradient differs, how many were compared and how many there are.

    A tied embedding has a gradient on each stage: ours and theirs are returned for the parent to add. Over
    several micro-batches each stage adds its own first, which is not transformers' order.
    """
    run = build_untrained(config, folder)
    torch.manual_seed(0)
    table = hf.get_input_embeddings().weight
    (tied,) = (name for name, weight in hf.named_parameters() if weight is table)
    if config.model.untie_embeddings_and_output_weights:
        tied = ""
    batches = _batches(config, 2, STAGED_LENGTH, count=1 if tied else 2)
    _, losses, gradients = _hf_step(hf, batches)
    ours = _our_step(run, batches)
    mine = hf_gradients(run.stages, config)
    new_job()
    differing = [
        name for name in mine if name != tied and not torch.equal(mine[name], _gradient_of(name, gradients))
    ]
    shared = (mine[tied].float().numpy(), gradients[tied].float().numpy()) if tied else None
    return ours, losses, differing, len(_in_memory(mine)), len(gradients) + bool(tied), shared


def _tp_nearness(hf: Any, folder: Path, config: RunConfig) -> tuple[float, float, float]:
    """Least cosine and largest error of the logits, and the largest relative error of a cut gradient."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    run = build_untrained(config, folder)
    torch.manual_seed(0)
    batches = _batches(config, 2, STAGED_LENGTH)
    logits, _, gradients = _hf_step(hf, batches)
    with torch.no_grad():
        ours = gather_from_tensor_model_parallel_region(run.stages[0](batches[0].tokens, None, None))
    ours, logits = ours[..., : config.model.vocab_size].double(), logits.double()
    _our_step(run, batches)
    columns = gradients["model.layers.0.self_attn.o_proj.weight"].chunk(2, dim=1)
    expected = columns[parallel_state.get_tensor_model_parallel_rank()].float()
    mine = run.stages[0].decoder.layers[0].self_attention.linear_proj.weight.grad.float()
    new_job()
    cosine = torch.nn.functional.cosine_similarity(ours, logits, dim=-1).min().item()
    relative = (mine - expected).abs().max() / expected.abs().max()
    return cosine, (ours - logits).abs().max().item(), relative.item()


@pytest.fixture(scope="module")
def pair(root: Path) -> list[dict[tuple, Any]]:
    """What each of two processes found."""
    return run_distributed(run_two_processes, 2, root)


@pytest.mark.long
@pytest.mark.parametrize("case", STAGED, ids="-".join)
def test_two_stages_equal_transformers(pair: list, case: tuple) -> None:
    first, last = (found[case] for found in pair)
    assert last[0] == last[1]
    assert first[2] == last[2] == []
    assert first[3] + last[3] == last[4]
    if first[5] is not None:
        total = torch.from_numpy(first[5][0] + last[5][0]).to(DTYPES[case[1]])
        assert torch.equal(total.float(), torch.from_numpy(last[5][1]))


@pytest.mark.parametrize("case", CUT)
@pytest.mark.long
def test_tensor_parallel_is_near_transformers(pair: list, case: tuple) -> None:
    for found in pair:
        cosine, error, relative = found[case]
        if case[1] == "fp32":
            assert error < 1e-5 and relative < 1e-5
        else:
            assert cosine >= 0.999 and relative < 0.1
