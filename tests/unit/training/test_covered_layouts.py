"""The rows of tests/covered_layouts.md train as one process does: losses, gradient norms and evaluation.

The rows are a covering array: any two values of different columns are in some row together, if a run can have
both. A new feature is a value or a column of COLUMNS; the test that fails then prints the whole table.

One process trains on the conversations one by one; rows may pack them, and compute their loss in several
chunks. So the same sums come from different code, in another order.
"""

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from covering_array import Row, Rule, all_pairs, further_rows, is_legal, legal_pairs, pairs_of
from distributed_runner import new_job, run_distributed
from packed_runs import LENGTH, SIZES, Talks, batches_of, in_batches
from proofs import prove_all, shrunk
from small_runs import small_run
from training_runs import SeededReader, build_seeded_run

from patch.checks.notes import notes
from patch.checks.rules import RULES
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.data.packing import SOURCES, PairSource
from patch.device import MachineFacts
from patch.distributed.collectives import max_over_world
from patch.distributed.context_group import Zigzag
from patch.errors import ConfigError
from patch.features.table import CONFLICTS
from patch.model import loss
from patch.plan.flops import attended_pairs
from patch.training import OBJECTIVES
from patch.training.evaluation import evaluate
from patch.training.objectives.distillation import Distillation
from patch.training.setup import Run
from patch.training.step import train_step

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # the first test trains all rows

TABLE = Path(__file__).parents[2] / "covered_layouts.md"
STEPS, PROCESSES = 5, 8
STEPS_ROUNDED = 3
"""In fewer bits than fp32: bounds are wide, and 16-bit products slow on a CPU without their instructions."""
CHUNK = 24
"""Tokens of the loss; ranks have 16 to 256 of a micro-batch."""
WINDOW = (7, 0)

COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "TP": {"1": {}, "2": {"tp": 2}},
    "PP": {"1": {}, "2": {"pp": 2}},
    "VPP": {"1": {}, "2": {"stage": 1}},
    "stages": {"even": {}, "by hand": {}},
    "CP": {"1": {}, "2": {"cp": 2}, "4": {"cp": 4}},
    "by": {"-": {}, "p2p": {"cp_comm_type": "p2p"}, "a2a": {"cp_comm_type": "a2a"}},
    "SP": {"no": {}, "yes": {"sequence_parallel": True}},
    "overlap": {"auto": {}, "no": {"tp_comm_overlap": False}},
    "AC": {
        "none": {},
        "sel": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full"},
        "block": {"recompute_granularity": "full", "recompute_method": "block"},
        "offload": {"cpu_offloading": True},
    },
    "ranks": {"tp-cp-dp-pp": {}, "pp-dp-cp-tp": {"rank_order": "pp-dp-cp-tp"}},
    "DO": {level: {"data_parallel_sharding": level} for level in ("none", "optimizer", "gradients")}
    | {"parameters": {"data_parallel_sharding": "parameters", "param_persistence_threshold": 40}},
    "instances": {"1": {}, "2": {"num_distributed_optimizer_instances": 2}},
    "message": {"whole": {}, "bf16": {"grad_reduce_in_bf16": True}},
    "sums": {"plain": {}, "fused": {"gradient_accumulation_fusion": True}},
    "offload": {
        "none": {},
        "half": {
            "optimizer_offload_policy": "static",
            "optimizer_offload_fraction": 0.5,
            "optimizer_offload_chunk_size": 1999,
            "optimizer_offload_streamed": 0.5,
        },
    },
    "PR": {precision: {"precision": precision} for precision in ("fp32", "bf16", "fp16", "fp8")}
    | {"fp8-gather": {"precision": "fp8", "fp8_param_gather": True}},
    "packing": {"no": {}, "yes": {"packing": True}},
    "batches": {"1": {}, "2": {}},
    "model": {
        "plain": {},
        "tied": {"untie_embeddings_and_output_weights": False},
        "families": {
            "add_qkv_bias": True, "qk_layernorm": True, "window_size": WINDOW, "rope_scaling_type": "yarn",
            "rope_original_max_position": 16, "rope_scaling_factor": 2.0,
        },
        "bloom": {
            "model_type": "bloom", "use_rope_scaling": False, "untie_embeddings_and_output_weights": False,
            "rotary_base": 1e4,
        },
        "mixtral": {"model_type": "mixtral", "num_experts": 4},
        "qwen-moe": {
            "model_type": "qwen2_moe", "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "2",
            "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "add_qkv_bias": True,
            "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01,
        },
        "deepseek": {
            "model_type": "deepseek_v2", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "kv_channels": 12, "num_query_groups": 8,
            "use_rope_scaling": False, "num_experts": 4, "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 48, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
            "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0,
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05,
        },
        "glm-4.5": {
            "model_type": "glm4_moe", "rotary_percent": 0.5, "use_rope_scaling": False, "add_qkv_bias": True,
            "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 24,
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2, "moe_router_group_topk": 1,
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05,
        },
    },
    "EP": {"1": {}, "2": {"expert_model_parallel_size": 2}},
    "ETP": {"-": {}} | {size: {"expert_tensor_parallel_size": int(size)} for size in "12"},
    "tokens": {"alltoall": {}, "allgather": {"moe_token_dispatcher_type": "allgather"}},
    "LoRA": {"no": {}, "yes": {"lora_rank": 3}}
    | {name: {"lora_rank": 3, "quantize_base": name} for name in ("nf4", "nf4-double")},
    "objective": {
        "sft": {}, **{name: {"objective": name, "dpo_beta": 0.5} for name in ("dpo", "orpo")},
        "kto": {"objective": "kto", "dpo_beta": 0.5, "undesirable_weight": 0.1},
        "distill": {"distill_from": "a store", "distill_alpha": 0.7, "distill_temperature": 2.0},
    },
    "freeze": {"no": {}, "yes": {"freeze": r"embed|\.0\..*(mlp|moe)|o_proj|dense"}},
    "noise": {"no": {}, "yes": {"neftune_noise_alpha": 20.0}},
    "optimizer": {
        "adam": {},
        "sgd": {"optimizer": "sgd", "lr": 0.1},
        "muon": {"optimizer": "muon", "muon_scale_mode": "shape_scaling"},
    },
}  # fmt: skip
WITH_EXPERTS = ("mixtral", "qwen-moe", "deepseek", "glm-4.5")
CHANGE_SUMS = {
    *("TP", "PP", "VPP", "stages", "CP", "by", "SP", "instances", "packing", "model", "EP", "ETP", "tokens"),
    *("LoRA", "objective"),
}
"""Columns whose values are tested to 5e-6 in pairs; those of others change no bit, which other tests show."""
VALUES = {column: list(values) for column, values in COLUMNS.items()}
FIRST = {column: values[0] for column, values in VALUES.items()}


@functools.cache
def agree(names: str, *values: str) -> bool:
    """Whether the table of features has no conflict between these values of columns."""
    cells = zip(names.split(), values, strict=True)
    run = small_run(**{key: each for column, value in cells for key, each in COLUMNS[column][value].items()})
    return not any(conflict.is_met(run) for conflict in CONFLICTS)


RULES_OF_ROWS = [
    *(
        Rule((*names.split(),), functools.partial(agree, names))
        for names in (
            *("PR model", "PR LoRA", "PR offload", "model LoRA", "model EP instances"),
            *("PR freeze", "LoRA freeze"),
        )
    ),
    Rule(("PP", "VPP"), lambda pp, vpp: pp == "2" or vpp == "1"),
    Rule(("PP", "stages"), lambda pp, stages: pp == "2" or stages == "even"),
    Rule(("TP", "SP"), lambda tp, sp: tp == "2" or sp == "no"),
    Rule(("TP", "overlap"), lambda tp, overlap: tp == "2" or overlap == "auto"),
    Rule(("CP", "by"), lambda cp, way: (cp == "1") == (way == "-")),
    Rule(("PR", "DO"), lambda precision, level: "gather" not in precision or level != "none"),
    Rule(("DO", "instances"), lambda level, instances: level != "none" or instances == "1"),
    Rule(("DO", "message"), lambda level, message: level != "none" or message == "whole"),
    Rule(  # of two replicas or more
        ("TP", "PP", "instances"),
        lambda tp, pp, instances: int(tp) * int(pp) * int(instances) * 2 <= PROCESSES,
    ),
    Rule(("model", "EP"), lambda model, ep: model in WITH_EXPERTS or ep == "1"),
    Rule(("model", "ETP"), lambda model, etp: (model in WITH_EXPERTS) == (etp != "-")),
    Rule(("TP", "ETP"), lambda tp, etp: tp == "2" or etp != "2"),
    Rule(("TP", "EP", "ETP"), lambda tp, ep, etp: ep == "2" or etp in ("-", tp)),
    Rule(("EP", "tokens"), lambda ep, way: ep == "2" or way == "alltoall"),
    Rule(("EP", "ETP", "tokens"), lambda ep, etp, way: (ep, etp) != ("2", "2") or way == "allgather"),
    Rule(  # experts have the pipelines of the layers around them
        ("TP", "PP", "CP", "ranks", "EP", "ETP"),
        lambda tp, pp, cp, ranks, ep, etp: (
            "1" == pp or etp == "-" or ranks.endswith("pp") or int(ep) * int(etp) == int(cp) * int(tp)
        ),
    ),
    Rule(("TP", "SP", "model"), lambda tp, sp, model: tp == "1" or sp == "yes" or model not in WITH_EXPERTS),
    Rule(("VPP", "batches"), lambda vpp, batches: int(vpp) <= int(batches)),
    Rule(("TP", "PP", "CP"), lambda tp, pp, cp: int(tp) * int(pp) * int(cp) <= PROCESSES),
    Rule(
        ("TP", "PP", "CP", "packing", "batches"),
        lambda tp, pp, cp, packing, batches: (
            SAMPLES[packing] * int(tp) * int(pp) * int(cp) >= PROCESSES * int(batches)
        ),
    ),
]
SHAPE = {
    "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 8, "kv_channels": 8,
    "vocab_size": 250, "train_iters": STEPS, "reduce_bucket_size": 20_000,
}  # fmt: skip
LAYERS_OF_A_PROCESS = 2
BY_HAND = {("1", "1"): "EttL", ("2", "1"): "Ettt|tL", ("2", "2"): "Et|tt|t|L"}
"""Stages by PP and VPP."""
SAMPLES = {"yes": 8, "no": 16}
"""Of a step, by packing."""
ROWS_OF = {
    "pair": [15, 12, 3, 2, 10, 14, 3, 5, 5, 15, 7, 4, 9, 8, 4, 9],
    "unpaired": [10, 22, 5, 9, 20, 11, 11, 5],
}
"""Tokens of the sequences of eight rows, which fill four packed rows."""


def table(beginning: str) -> list[list[str]]:
    """The cells of the table whose header begins so; first its header."""
    lines = itertools.dropwhile(lambda line: not line.startswith(beginning), TABLE.read_text().splitlines())
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[:1] + rows[2:]]


HEADER, *CELLS = table("| TP | PP |")
ROWS = [FIRST | dict(zip(HEADER, cells, strict=True)) for cells in CELLS]
ROWS = ROWS[:: int(os.environ.get("COVERED_EVERY", "1"))]  # a sample, for another megatron-core
BOUNDS = {precision: (float(loss), float(norm)) for precision, loss, norm in table("| PR | loss |")[1:]}
"""Of losses near 5.5 (absolute), and of gradient norms (relative)."""


def run_of(row: Row) -> RunConfig:
    """The row's run; replicas fill the processes."""
    changes = changes_of(row)
    num_replicas = PROCESSES // (int(row["TP"]) * int(row["PP"]) * int(row["CP"]))
    micro_batch = changes["global_batch_size"] // (num_replicas * int(row["batches"]))
    return small_run(dp=num_replicas, **changes, micro_batch_size=micro_batch)


def one_process_of(row: Row) -> RunConfig:
    """One process with the same model, precision and conversations, and nothing else.

    But for the losses of routers, which are means over a micro-batch, and for noise, which depends on a row:
    it has the same ones, one by one.
    """
    ours = run_of(row)
    has_row_sums = ours.experts.moe_aux_loss_coeff or ours.training.neftune_noise_alpha
    kept = "PR model LoRA objective freeze noise optimizer".split() + ["packing"] * bool(has_row_sums)
    changes = changes_of(FIRST | {column: row[column] for column in kept})
    size = ours.training.micro_batch_size if "packing" in kept else changes["global_batch_size"]
    layers = {name: getattr(ours.model, name) for name in ("num_layers", "moe_layer_freq")}
    return small_run(**changes | layers, micro_batch_size=size)


def changes_of(row: Row) -> dict[str, Any]:
    changes = {key: value for column, name in row.items() for key, value in COLUMNS[column][name].items()}
    if row["stages"] == "by hand":
        changes |= {"stage": 0, "pipeline_model_parallel_layout": BY_HAND[row["PP"], row["VPP"]]}
    if (row["DO"], row["offload"], row["instances"]) == ("parameters", "half", "1"):
        changes |= {"cpu_offloading_weights": True, "cpu_offloading_weights_fraction": 0.5}
    num_layers = LAYERS_OF_A_PROCESS * int(row["PP"])
    if row["model"] == "deepseek":
        changes["moe_layer_freq"] = f"[0]+[1]*{num_layers - 1}"
    changes = SHAPE | changes
    if row["LoRA"].startswith("nf4") and row["model"] != "deepseek":  # a rank has whole blocks of 64
        sizes = (name for name in changes if name.endswith(("hidden_size", "intermediate_size")))
        changes |= {"kv_channels": 16, **dict.fromkeys(sizes, 128)}
    return changes | {"num_layers": num_layers, "global_batch_size": SAMPLES[row["packing"]]}


class Trained(NamedTuple):
    """The steps of a run."""

    losses: list[float]
    """The last one is that of an evaluation."""
    grad_norms: list[float]
    skipped: list[int]
    attended_pairs: float
    """Of the first step."""


def conversations(config: RunConfig, iteration: int) -> list[Batch]:
    """The micro-batches of a step: 16 conversations, in 8 packed rows or in 16; or 16 pairs, in each step."""
    if config.row_kind != "conversation":
        return in_batches(config, list(chain.from_iterable(rows_of_run(config))))
    batches = batches_of(config, Talks(2 * iteration), Talks(2 * iteration + 1))
    return [taught(batch) for batch in batches] if config.data.distill_from else batches


def taught(batch: Batch) -> Batch:
    """A teacher that says the same five tokens, and the rest, whenever it sees the same label."""
    ids = (7 * batch.labels[..., None] + 31 * torch.arange(5)) % SHAPE["vocab_size"]
    logs = torch.log_softmax(3 * torch.sin(batch.labels[..., None] + torch.arange(6.0)), dim=-1)
    return batch._replace(extra_tensors={"teacher": torch.cat((ids, logs), dim=-1)})


def rows_of_run(config: RunConfig) -> list[PairSource]:
    talks = [Talks(seed, sizes=ROWS_OF[config.row_kind]) for seed in range(2)]
    for own in talks:
        own.be_desirable_alternately()
    source, how = SOURCES[config.row_kind], {"is_packed": config.data.packing}
    return [source(own, LENGTH, first=16 * number, **how) for number, own in enumerate(talks)]


def prefer(run: Run) -> None:
    """Give a run the objective of its rows, with the reference that its layout computes."""
    config = run.config
    with TemporaryDirectory() as folder:
        checkpoint = replace(config.checkpoint, output_path=folder)
        config = replace(config, checkpoint=checkpoint, data=replace(config.data, cache_dir=folder))
        run.data.objective = objective = OBJECTIVES[config.training.objective](config)
        objective.sets = rows_of_run(config)
        objective.prepare(run)


def train_all(rank: int, world_size: int, configs: Sequence[RunConfig]) -> list[Trained]:
    if world_size > 1:
        loss.chunk_length = lambda *shape, cuda=False: CHUNK
    return [train(config) for config in configs]


def train(config: RunConfig) -> Trained:
    try:
        run = build_seeded_run(config)
        zigzag = Zigzag.of(run.groups.cp)
        reader = SeededReader(config, run.groups.dp.rank(), zigzag, conversations, num_steps=1)
        run.data.train_reader, run.data.valid_readers = reader, {"valid": reader}  # type: ignore[dict-item]
        if config.row_kind != "conversation":
            prefer(run)
        if config.data.distill_from:
            run.data.objective = Distillation(config)
        num_steps = STEPS if config.training.precision == "fp32" else STEPS_ROUNDED
        results = [train_step(run, iteration) for iteration in range(num_steps)]
        losses = max_over_world([*(r.loss for r in results), evaluate(run)["valid_loss"]], run.device)
        new_job()
    except Exception as error:
        error.add_note(f"in the row of {config}")
        raise
    norms, skipped = [r.grad_norm for r in results], [r.skipped for r in results]
    return Trained(losses, norms, skipped, results[0].attended_pairs)


@pytest.fixture(scope="module")
def of_one() -> dict[RunConfig, Trained]:
    configs = list({one_process_of(row): None for row in ROWS})
    return dict(zip(configs, run_distributed(train_all, 1, configs, timeout_s=1000)[0], strict=True))


@pytest.fixture(scope="module")
def of_eight() -> list[tuple[Trained, ...]]:
    """By row, of each rank."""
    ranks = run_distributed(train_all, PROCESSES, [run_of(row) for row in ROWS], timeout_s=1000)
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: " ".join(ROWS[number].values()))
def test_row_trains_as_one_process(of_one: dict, of_eight: list, number: int) -> None:
    row = ROWS[number]
    one = of_one[one_process_of(row)]
    rounded = [row["PR"], *(["any, sent as bf16"] if row["message"] == "bf16" else [])]
    loss_bound, norm_bound = (max(bounds) for bounds in zip(*(BOUNDS[name] for name in rounded), strict=True))
    for ours in of_eight[number]:
        assert ours.losses == pytest.approx(one.losses, abs=loss_bound)
        assert ours.grad_norms == pytest.approx(one.grad_norms, rel=norm_bound)
        assert ours.skipped == one.skipped
        has_margin = row["objective"] != "dpo" or row["noise"] == "yes"  # the reference has no noise
        assert has_margin or ours.losses[0] == torch.tensor(2.0).log().item()


def test_rows_are_proved_by_llama_patch_prove(tmp_path: Path) -> None:
    """A fourth of them; with its own tokens, every gradient, weight and state.

    An nf4 base is read from a folder, and transformers has no BLOOM with grouped heads.
    """
    rows = [row for row in ROWS[::4] if row["model"] != "bloom" or "nf4" not in row["LoRA"]]
    assert not prove_all([shrunk(run_of(row), tmp_path / str(n)) for n, row in enumerate(rows)])


@pytest.mark.parametrize("model", COLUMNS["model"])
def test_attention_of_a_packed_step_is_counted_sequence_by_sequence(of_eight: list, model: str) -> None:
    lengths = 2 * [*SIZES, 4, 1]  # and the padding of two rows
    expected = attended_pairs(lengths, WINDOW if model == "families" else None)
    for row, ranks in zip(ROWS, of_eight, strict=True):
        if (row["model"], row["packing"], row["objective"]) == (model, "yes", "sft"):
            assert {trained.attended_pairs for trained in ranks} == {expected}


def with_all_pairs(rows: list[Row]) -> list[Row]:
    """These rows, and others so that no pair is missing, nor in fp32 a pair of what changes sums."""
    in_fp32 = VALUES | {"PR": ["fp32"], "message": ["whole"]}
    for values, columns in ((VALUES, {*VALUES}), (in_fp32, CHANGE_SUMS)):
        present = pairs_of(row for row in rows if all(row[column] in values[column] for column in row))
        wanted = {pair for pair in legal_pairs(values, RULES_OF_ROWS) if dict(pair).keys() <= columns}
        rows = [*rows, *further_rows(values, RULES_OF_ROWS, wanted - present)]
    return rows


def test_table_has_every_pair_that_is_possible() -> None:
    assert all(is_legal(row, RULES_OF_ROWS) for row in ROWS)
    rows = with_all_pairs(ROWS)
    lines = [list(VALUES), ["---"] * len(VALUES), *(row.values() for row in rows)]
    whole = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    assert rows == ROWS and list(COLUMNS) == HEADER, f"the table with all pairs:\n{whole}"


def told(row: Row) -> str:
    """What the rules say of a row: the error of the first that refuses it, or their notes."""
    config, machine = run_of(row), MachineFacts(cuda_devices=0, cpu_cores=2)
    try:
        for rule in RULES:
            rule(config, machine)
    except ConfigError as error:
        return str(error)
    slow = "fp8 is slower than bf16 on a CPU"
    return "\n".join(note for note in notes(config, machine) if slow not in note)


def test_what_no_row_has_is_refused_or_has_no_effect() -> None:
    """But for CP without a way, which takes one of the two: `--cp-comm-type auto`, and ETP without a size."""
    for pair in all_pairs(VALUES) - legal_pairs(VALUES, RULES_OF_ROWS):
        row = FIRST | {"PP": "2"} | dict(pair)
        is_default = (row["CP"] != "1" and row["by"] == "-") or dict(pair).keys() == {"model", "ETP"}
        assert told(row) or is_default, pair
    assert {told(row) for row in ROWS} == {""}
