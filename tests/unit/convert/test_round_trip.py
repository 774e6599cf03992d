"""Hugging Face -> running model -> Hugging Face, bit for bit, at TP, PP and DP 1 and 2; and its logits.

The oracle of the layout is upstream's plain GPTModel beside transformers, not the way back.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from safetensors.torch import load_file
from small_runs import hf_llama, small_run
from transformers import AutoTokenizer, LlamaForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [(precision, tied) for precision in DTYPES for tied in (False, True)]
LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
TOKENS = torch.arange(2 * 12).reshape(2, 12) * 7 % 250


def _run(tp, pp, dp, precision="fp32", tied=False, **changes):
    return small_run(tp, pp, dp, precision=precision, untie_embeddings_and_output_weights=not tied, **changes)


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
        model = hf_llama(_run(1, 1, 1, precision, tied)).to(DTYPES[precision])
        model.save_pretrained(root / f"{precision}-{tied}", max_shard_size="200KB")
    return root


def _convert_both_ways(rank, world_size, root, out, layout, tokenizer):
    from patch.convert import export_hf, import_hf
    from patch.model import build_llama_model

    groups = _groups(_run(*layout))
    for precision, tied in CASES:
        config, name = _run(*layout, precision, tied), f"{precision}-{tied}"
        model = build_llama_model(config, groups, torch.device("cpu"))
        import_hf(model, root / name, config, groups)
        export_hf(
            model, out / name, config, groups,
            hf_source=root / name, tokenizer=tokenizer, file_bytes=150_000 if tied else 2**30,
        )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_bit_equal(sources, tmp_path, layout, tiny_tokenizer):
    tokenizer = tiny_tokenizer("{{ messages }}<|eot_id|>")
    world_size = layout[0] * layout[1] * layout[2]
    run_distributed(_convert_both_ways, world_size, sources, tmp_path, layout, tokenizer)
    for precision, tied in CASES:
        source, target = (root / f"{precision}-{tied}" for root in (sources, tmp_path))
        before, after = _tensors(source), _tensors(target)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype == DTYPES[precision]
            assert torch.equal(after[name], tensor), name
        assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert len(list(target.glob("*.safetensors"))) == (layout[1] if not tied else _count(target))
        _loads_cleanly(target)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


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

    from patch.model.llama import transformer_config

    class Upstream(GPTModel):
        def setup_embeddings_and_output_layer(self):
            """Left out: it moves tied embeddings to CUDA, to compare the copies."""

    return Upstream(
        transformer_config(config, cuda=False),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
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


def _upstream_logits(rank, world_size, root, layout):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from patch.compat.cpu import replace_torch
    from patch.convert import import_hf

    groups = _groups(_run(*layout))
    replace_torch("megatron.core.utils")  # upstream's own attention takes a buffer on the current device
    model_parallel_cuda_manual_seed(1)  # and its (unused) dropout a random state of each TP rank
    logits = []
    for tied in (False, True):
        config = _run(*layout, tied=tied, use_rope_scaling=False)
        model = _upstream_model(config, groups)
        import_hf(model, root / str(tied), config, groups)
        logits.append(_forward(model, config, groups))
    return logits


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)])
def test_upstream_model_with_imported_weights_has_transformers_logits(tmp_path, layout):
    for tied in (False, True):
        hf_llama(_run(*layout, tied=tied, use_rope_scaling=False), tmp_path / str(tied))
    outputs = run_distributed(_upstream_logits, layout[0] * layout[1], tmp_path, layout)
    last_stage = outputs[-layout[0] :]
    for index, tied in enumerate((False, True)):
        with torch.no_grad():
            expected = LlamaForCausalLM.from_pretrained(tmp_path / str(tied)).eval()(TOKENS).logits
        for output in last_stage:
            torch.testing.assert_close(torch.from_numpy(output[index]), expected, atol=1e-4, rtol=0)


def _import_with_padding_and_rounding(rank, world_size, root):
    from patch.convert import import_hf
    from patch.model import build_llama_model

    config = _run(1, 1, 1, "bf16")
    groups = _groups(config)
    model = build_llama_model(config, groups, torch.device("cpu"))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("patch.convert").addHandler(handler)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    import_hf(model, root / "fp32-False", config, groups)
    weights = dict(model.named_parameters())
    source = _tensors(root / "fp32-False")
    for name, hf_name in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        weight = weights[f"{name}.weight"]
        assert weight.shape[0] == 256 and not weight[250:].any()
        assert torch.equal(weight[:250], source[f"{hf_name}.weight"].bfloat16())
    import_hf(model, root / "bf16-False", config, groups)
    return messages


def test_rounding_is_said_once_and_padding_is_zero(sources):
    (messages,) = run_distributed(_import_with_padding_and_rounding, 1, sources)
    assert len(messages) == 1 and "F32" in messages[0] and "rounded to bfloat16" in messages[0]


def _try_import(rank, world_size, folder: Path):
    from patch.convert import import_hf
    from patch.errors import ConversionError
    from patch.model import build_llama_model

    config = _run(2, 1, 1)
    groups = _groups(config)
    model = build_llama_model(config, groups, torch.device("cpu"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    own = folder if rank == 0 else folder.parent / "whole"
    with pytest.raises(ConversionError) as caught:
        import_hf(model, own, config, groups)
    untouched = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    return str(caught.value), untouched


def test_import_fails_on_every_rank_when_one_cannot_read(tmp_path):
    hf_llama(_run(1, 1, 1), tmp_path / "whole")
    hf_llama(_run(1, 1, 1), tmp_path / "broken")
    (tmp_path / "broken" / "config.json").unlink()
    (first, untouched), (second, _) = run_distributed(_try_import, 2, tmp_path / "broken")
    assert "has no config.json" in first and untouched
    assert "rank 0" in second and "has no config.json" in second
