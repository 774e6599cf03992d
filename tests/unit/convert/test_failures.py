"""What happens to all ranks when something is wrong on one; and rounding, which is said once."""

import logging
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from safetensors.torch import load_file
from small_runs import hf_llama, small_run

RUN = small_run(tp=2, precision="bf16")


def _import_broken_on_rank_0(rank, model, root: Path, groups):
    """The error's message, and whether this rank's weights were left alone."""
    from patch.convert import import_hf
    from patch.errors import ConversionError

    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConversionError) as caught:
        import_hf([model], root / ("broken" if rank == 0 else "whole"), RUN.model, groups)
    untouched = all(map(torch.equal, before, model.parameters()))
    return str(caught.value), untouched


def _import_rounded(model, folder: Path, groups):
    """What was logged, and the words' rows of the embedding that this rank holds."""
    from patch.convert import import_hf

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("patch.convert").addHandler(handler)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    import_hf([model], folder, RUN.model, groups)
    return messages, model.embedding.word_embeddings.weight.detach().float().numpy()


def _export_on_full_disk(rank, model, folder: Path, groups, tokenizer):
    """The error's message; a file of rank 0 ends at 20 kB from now on, as on a full disk."""
    from patch.convert import export_hf
    from patch.errors import ConversionError

    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(ConversionError) as caught:
        export_hf([model], folder, RUN.model, groups, hf_source=None, tokenizer=tokenizer, file_bytes=50_000)
    return str(caught.value)


def _trouble(rank, world_size, root: Path, tokenizer):
    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from patch.model import build_llama_model, initialize_weights

    compat.apply(cuda=False)
    groups = initialize(RUN, DeviceContext(torch.device("cpu"), "gloo"))
    (model,) = build_llama_model(RUN.model, groups, torch.device("cpu"), RUN.execution)
    # memory as it comes may hold NaN, which equals nothing
    initialize_weights([model], RUN.model, RUN.training.seed)
    return (
        _import_broken_on_rank_0(rank, model, root, groups),
        _import_rounded(model, root / "whole", groups),
        _export_on_full_disk(rank, model, root / "target", groups, tokenizer),
    )


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name in ("whole", "broken", "target"):
        hf_llama(small_run(), root / name)
    (root / "broken" / "config.json").unlink()
    return root


@pytest.fixture(scope="module")
def target_before(root):
    return _contents(root / "target")


@pytest.fixture(scope="module")
def reports(root, target_before, tiny_tokenizer):
    """For each rank what the three troubles came to."""
    return run_distributed(_trouble, 2, root, tiny_tokenizer())


def test_import_fails_on_every_rank_when_one_cannot_read(reports):
    (own, untouched), (other, _) = (report[0] for report in reports)
    assert "broken has no config.json" in own and untouched
    assert other == f"rank 0: {own}"


def test_rounding_is_said_once_and_padding_is_zero(root, reports):
    (messages, first), (_, second) = (report[1] for report in reports)
    assert len(messages) == 1 and "F32" in messages[0] and "rounded to bfloat16" in messages[0]
    rows = torch.cat([torch.from_numpy(first), torch.from_numpy(second)])
    words = load_file(root / "whole" / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.shape[0] == 256 and torch.equal(rows[:250], words.bfloat16().float())
    assert not rows[250:].any()


def test_full_disk_on_one_rank_fails_on_all_and_keeps_the_target(root, target_before, reports):
    own, other = (report[2] for report in reports)
    assert "cannot write" in own and ".safetensors" in own and "File too large" in own
    assert other == f"rank 0: {own}"
    assert sorted(os.listdir(root)) == ["broken", "target", "whole"]
    assert _contents(root / "target") == target_before
