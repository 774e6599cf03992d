"""Hugging Face -> running model -> Hugging Face, bit for bit, at TP, PP, VPP and DP 1 and 2; and its logits.

The oracle of the layout is upstream's plain GPTModel beside transformers, not the way back.
"""

import json
from itertools import chain

import pytest
import torch
from distributed_runner import run_distributed
from hf_families import spell_as_4
from safetensors.torch import load_file
from small_runs import hf_llama, small_run
from transformers import AutoTokenizer, LlamaForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [(precision, tied) for precision in DTYPES for tied in (False, True)]
# TP, PP, DP and layers of an interleaved stage.
LAYOUTS = [(1, 1, 1, 0), (1, 1, 2, 0), (2, 1, 1, 0), (1, 2, 1, 0), (2, 2, 1, 1)]
TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % 250


def _run(tp, pp, dp, stage=0, precision="fp32", tied=False):
    """No RoPE scaling: upstream's own model cannot be told all of its fields."""
    changes = {"precision": precision, "untie_embeddings_and_output_weights": not tied}
    return small_run(tp, pp, dp, stage, use_rope_scaling=False, **changes)


def _tensors(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _groups(config):
    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize

    compat.apply(cuda=False)
    return initialize(config, DeviceContext(torch.device("cpu"), "gloo"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One folder for each precision and tying, in several shards."""
    root = tmp_path_factory.mktemp("sources")
    for precision, tied in CASES:
        model = hf_llama(_run(1, 1, 1, 0, precision, tied)).to(DTYPES[precision])
        model.save_pretrained(root / f"{precision}-{tied}", max_shard_size="200KB")
        spell_as_4(root / f"{precision}-{tied}")
    return root


def _convert(rank, world_size, root, out, layout, tokenizer):
    """Both ways for every case; returns the logits of upstream's model, untied and tied.

    They are None before the last stage.
    """
    from patch.convert import export_hf, import_hf
    from patch.model import build_llama_model

    groups = _groups(_run(*layout))
    for precision, tied in CASES:
        config, name = _run(*layout, precision, tied), f"{precision}-{tied}"
        stages = build_llama_model(config.model, groups, torch.device("cpu"), config.execution)
        for parameter in chain.from_iterable(stage.parameters() for stage in stages):
            parameter.data.fill_(float("nan"))
        import_hf(stages, root / name, config.model, groups)
        export_hf(
            stages, out / name, config.model, groups,
            hf_source=root / name, tokenizer=tokenizer, file_bytes=150_000 if tied else 2**30,
        )  # fmt: skip
    return [
        _upstream_logits(root / f"fp32-{tied}", _run(*layout[:3], tied=tied), groups)
        for tied in (False, True)
    ]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: "tp{}-pp{}-dp{}-stage{}".format(*layout))
def converted(request, sources, tmp_path_factory, tiny_tokenizer):
    """(layout, folder of the exports, what each rank returned), made once for all tests of a layout."""
    layout, out = request.param, tmp_path_factory.mktemp("exports")
    tokenizer = tiny_tokenizer("{{ messages }}<|eot_id|>")
    world_size = layout[0] * layout[1] * layout[2]
    return layout, out, run_distributed(_convert, world_size, sources, out, layout, tokenizer)


@pytest.mark.parametrize(("precision", "tied"), CASES)
def test_round_trip_is_bit_equal(sources, converted, precision, tied):
    layout, out, _ = converted
    source, target = (root / f"{precision}-{tied}" for root in (sources, out))
    before, after = _tensors(source), _tensors(target)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == DTYPES[precision]
        assert torch.equal(after[name], tensor), name
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert len(list(target.glob("*.safetensors"))) == (layout[1] if not tied else _count(target))
    _loads_cleanly(target)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def _count(folder):
    """Files the index speaks of; with the small cap there are several, none of them much above it."""
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = [folder / name for name in set(placed.values())]
    assert len(files) > 2 and all(file.stat().st_size < 155_000 for file in files)
    return len(files)


def _loads_cleanly(folder):
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == next(iter(_tensors(folder).values())).dtype
    assert AutoTokenizer.from_pretrained(folder).chat_template.endswith("<|eot_id|>")


def _upstream_model(config, groups):
    """Upstream's own GPTModel of its own local spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    from patch.model.llama import transformer_config

    class Upstream(GPTModel):
        def setup_embeddings_and_output_layer(self):
            """Left out: it moves tied embeddings to CUDA, to compare the copies."""

    upstream = transformer_config(config.model, groups, config.execution, cuda=False)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    num_layers = get_num_layers_to_build(upstream, None, groups.pp.rank())
    return Upstream(
        upstream,
        # A layer's specification alone takes Transformer Engine's last norm, where that is installed.
        TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=WrappedTorchNorm),
        config.padded_vocab_size,
        64,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=config.model.rotary_base,
        parallel_output=False,
        pg_collection=groups,
    ).eval()


@torch.no_grad()
def _forward(model, config, groups):
    """Logits [B, S, V] on the last stage; hidden states travel by hand."""
    rank, tp = torch.distributed.get_rank(), groups.tp.size()
    batch, length = TOKENS.shape
    if groups.pp.rank() > 0:
        hidden = torch.empty(length, batch, config.model.hidden_size)
        torch.distributed.recv(hidden, src=rank - tp)
        model.set_input_tensor(hidden)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    output = model(TOKENS, torch.arange(length).expand(batch, -1), mask)
    if groups.pp.rank() < groups.pp.size() - 1:
        torch.distributed.send(output.contiguous(), dst=rank + tp)
        return None
    return output[..., : config.model.vocab_size].numpy()


def _upstream_logits(folder, config, groups):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from patch.compat.cpu import replace_torch
    from patch.convert import import_hf

    replace_torch("megatron.core.utils")  # upstream's own attention takes a buffer on the current device
    model_parallel_cuda_manual_seed(1)  # and its (unused) dropout a random state of each TP rank
    model = _upstream_model(config, groups)
    import_hf([model], folder, config.model, groups)
    return _forward(model, config, groups)


@pytest.mark.parametrize("tied", [False, True])
def test_upstream_model_with_imported_weights_has_transformers_logits(sources, converted, tied):
    _, _, by_rank = converted
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(sources / f"fp32-{tied}").eval()(TOKENS).logits
    outputs = [logits[tied] for logits in by_rank if logits[tied] is not None]
    assert outputs
    for output in outputs:
        torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-4, rtol=0)
