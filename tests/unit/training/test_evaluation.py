"""Evaluation counts each token of each validation set once, whatever the sizes, against transformers."""

import math
from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import hf_llama, small_run
from training_runs import build_seeded_run

from patch.data import BatchReader
from patch.data.samples import Sample
from patch.errors import DataError
from patch.training.evaluation import evaluate

BOUND = 1e-5
"""On losses near 6, between two implementations in fp32."""
SIZES = {"one": 1, "three": 3, "nine": 9, "twelve": 12}
"""Against global batches of 8 samples: smaller, and not a multiple."""
LAYOUTS = {
    "dp=2": {"dp": 2},
    "dp=2, batch of 4": {"dp": 2, "micro_batch_size": 4},
    "pp=2 interleaved": {"pp": 2, "stage": 1, "micro_batch_size": 1},
}


class Seeded:
    """Samples from a seed, a different number of learned tokens in each."""

    is_shuffled = False

    def __init__(self, size: int, seed: int, broken_at: int | None = None) -> None:
        self._size, self._seed, self._broken_at = size, seed, broken_at

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        if index == self._broken_at:
            raise DataError(f"sample {index} is damaged")
        generator = torch.Generator().manual_seed(1000 * self._seed + index)
        ids = torch.randint(0, 250, (33,), generator=generator)
        first = int(torch.randint(0, 31, (), generator=generator))
        return Sample(ids[:-1].clone(), ids[1:].clone(), (torch.arange(32) >= first).float())


def readers(run, sources: dict[str, Seeded]) -> dict[str, BatchReader]:
    training = run.config.training
    return {
        name: BatchReader(
            source, micro_batch_size=training.micro_batch_size, global_batch_size=training.global_batch_size,
            dp_rank=run.groups.dp.rank(), dp_size=run.groups.dp.size(), seed=1, shuffle=False,
        )
        for name, source in sources.items()
    }  # fmt: skip


def evaluate_everywhere(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, float]]:
    """What this rank finds in each layout; and alone, in order, with limits and weights."""
    found = {}
    sources = {name: Seeded(size, size) for name, size in SIZES.items()}
    for name, changes in LAYOUTS.items():
        run = build_seeded_run(small_run(global_batch_size=8, **changes), folder)
        run.data.valid_readers = readers(run, sources)
        found[name] = evaluate(run)
        if name == "dp=2":
            run.data.valid_weights = [1.0, 2.0, 3.0, 4.0]
            found["weights"] = evaluate(run)
            run.data.valid_readers, run.data.valid_weights = readers(run, {"nine": sources["nine"]}), None
            found["alone"] = evaluate(run)
        new_job()
    run = build_seeded_run(small_run(global_batch_size=8, dp=2, eval_iters=1, data_prefetch=0), folder)
    run.data.valid_readers = readers(run, sources)
    found["one batch"] = evaluate(run)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    hf_llama(small_run(), folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, float]]:
    first, second = run_distributed(evaluate_everywhere, 2, folder)
    assert first == second, "all ranks know the losses"
    return first


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """Summed loss and learned tokens of each sample, by transformers, one sample at a time."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    sums: dict[str, list[tuple[float, int]]] = {}
    for name, size in SIZES.items():
        for sample in map(Seeded(size, size).__getitem__, range(size)):
            with torch.no_grad():
                logits = model(sample.tokens[None]).logits[0]
            each = torch.nn.functional.cross_entropy(logits, sample.labels, reduction="none")
            total = (each * sample.loss_mask).sum().item()
            sums.setdefault(name, []).append((total, int(sample.loss_mask.sum())))
    return sums


def mean(sums: list[tuple[float, int]]) -> float:
    losses, counts = zip(*sums, strict=True)
    return sum(losses) / sum(counts)


def test_loss_is_the_mean_over_the_learned_tokens_of_each_set_and_of_all(
    found: dict, expected: dict
) -> None:
    names = ("", *(f"/{name}" for name in SIZES))
    keys = [f"{key}{name}" for name in names for key in ("valid_loss", "valid_ppl")]
    for record in (found[layout] for layout in LAYOUTS):
        assert list(record) == [*keys, "valid_tokens"]
        assert record["valid_tokens"] == sum(count for sums in expected.values() for _, count in sums)
        assert record["valid_loss"] == pytest.approx(mean(sum(expected.values(), [])), abs=BOUND)
        for name, sums in expected.items():
            assert record[f"valid_loss/{name}"] == pytest.approx(mean(sums), abs=BOUND)
            assert record[f"valid_ppl/{name}"] == math.exp(record[f"valid_loss/{name}"])


def test_a_set_alone_has_no_name_sets_have_weights_and_eval_iters_is_a_limit(
    found: dict, expected: dict
) -> None:
    assert list(found["alone"]) == ["valid_loss", "valid_ppl", "valid_tokens"]
    assert found["alone"]["valid_loss"] == pytest.approx(mean(expected["nine"]), abs=BOUND)
    weighted = sum(weight * mean(sums) for weight, sums in enumerate(expected.values(), 1)) / 10
    assert found["weights"]["valid_loss"] == pytest.approx(weighted, abs=BOUND)
    for name, sums in expected.items():
        assert found["one batch"][f"valid_loss/{name}"] == pytest.approx(mean(sums[:8]), abs=BOUND)


def evaluate_damaged(rank: int, world_size: int) -> list[str]:
    """The errors; before them, how many micro-batches are computed for three samples in batches of 16."""
    run = build_seeded_run(small_run(global_batch_size=16, micro_batch_size=1, dp=2))
    run.data.valid_readers, forwards = readers(run, {"three": Seeded(3, 1)}), []
    run.stages[0].register_forward_hook(lambda *_: forwards.append(1))
    evaluate(run)
    new_job()
    said = [f"{len(forwards)} computed"]
    for num_ahead in (0, 2):
        run = build_seeded_run(
            small_run(global_batch_size=4, micro_batch_size=1, dp=2, data_prefetch=num_ahead)
        )
        run.data.valid_readers = readers(run, {"damaged": Seeded(8, 1, broken_at=5)})
        with pytest.raises(DataError) as caught:
            evaluate(run)
        said.append(str(caught.value))
        new_job()
    return said


def test_what_only_fills_up_is_not_computed_and_what_one_rank_cannot_read_stops_all() -> None:
    good, bad = run_distributed(evaluate_damaged, 2)
    assert bad == ["2 computed", *["sample 5 is damaged"] * 2]
    other = "another rank cannot read the data of the validation set damaged; its own message says why"
    assert good == ["2 computed", other, other]
