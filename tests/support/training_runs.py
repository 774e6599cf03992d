"""Train small models in a test's processes, on seeded batches instead of files."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from distributed_runner import new_job
from megatron.core.process_groups_config import ProcessGroupCollection
from stale_reads import no_stale_reads
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from patch import compat
from patch.checkpoint import save_checkpoint
from patch.config.schema import RunConfig
from patch.convert import import_hf
from patch.convert.live_weights import mapped_parameters
from patch.data import Batch
from patch.data.samples import cut_batch
from patch.device import DeviceContext
from patch.distributed.collectives import max_over_world
from patch.distributed.context_group import WHOLE, Zigzag
from patch.distributed.groups import initialize
from patch.memory.disk import on_host
from patch.model import LlamaModel, build_llama_model, initialize_weights
from patch.optimizer import learning_rate
from patch.plan.memory import RankBytes
from patch.training.evaluation import evaluate
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.objectives.objective import Objective
from patch.training.run_state import Progress, find_progress, resume, state_to_save
from patch.training.setup import Run, RunData, build_run_optimizer, checkpoint_root
from patch.training.step import StepResult, train_step

CPU = DeviceContext(torch.device("cpu"), "gloo")


class Records(TrainerHook):
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_log(self, record: Record) -> None:
        self.records.append(record)


def messages_from(level: str, logger: str = "patch") -> list[str]:
    """Return a list that collects the messages of a logger and its children in this process from now on."""
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    logging.getLogger(logger).setLevel(level)
    return found


def seeded_batches(config: RunConfig, iteration: int) -> list[Batch]:
    """Return all micro-batches of a global batch. The number of unlearned tokens differs between rows."""
    generator = torch.Generator().manual_seed(iteration)
    size, length = config.training.micro_batch_size, config.sample_length
    batches = []
    for _ in range(config.training.global_batch_size // size):
        ids = torch.randint(0, config.model.vocab_size, (size, length + 1), generator=generator)
        learned_from = torch.randint(0, length - 1, (size, 1), generator=generator)
        mask = (torch.arange(length) >= learned_from).float()
        batches.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask))
    return batches


class SeededReader:
    """Reader of seeded global batches: micro-batch m of rank r is number m * DP + r.

    Args:
        zigzag: this CP rank's part of each sequence.
        batches: returns all micro-batches of a step.
        num_steps: number of steps of an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        dp_rank: int,
        zigzag: Zigzag = WHOLE,
        batches: Callable[[RunConfig, int], list[Batch]] = seeded_batches,
        num_steps: int = 2,
    ) -> None:
        self._config, self._dp_rank, self._zigzag = config, dp_rank, zigzag
        self._batches, self._num_steps = batches, num_steps

    def __len__(self) -> int:
        return self._num_steps

    def step(self, iteration: int) -> list[Batch]:
        own = self._batches(self._config, iteration)[self._dp_rank :: self._config.data_parallel_size]
        return [cut_batch(batch, self._zigzag) for batch in own]


def build_stages(
    config: RunConfig, context: DeviceContext = CPU, **how: Any
) -> tuple[ProcessGroupCollection, list[LlamaModel]]:
    """Return the process groups of a run, and this rank's stages with uninitialized weights."""
    compat.apply(cuda=context.is_cuda)
    groups = initialize(config, context)
    return groups, build_llama_model(config, groups, context.device, **how)


def build_seeded_run(
    config: RunConfig,
    hf_folder: Path | None = None,
    context: DeviceContext = CPU,
    is_frozen: Callable[[torch.nn.Module], bool] = lambda module: False,
) -> Run:
    """Return this rank's run with random weights, or those of a Hugging Face folder; freeze some modules."""
    groups, stages = build_stages(config, context)
    if hf_folder is None:
        initialize_weights(stages, config.model, config.training.seed)
    else:
        import_hf(stages, hf_folder, config.model, groups)
    for module in chain.from_iterable(stage.modules() for stage in stages):
        if is_frozen(module):
            module.requires_grad_(False)
    reader = SeededReader(config, groups.dp.rank(), Zigzag.of(groups.cp))
    optimizer = build_run_optimizer(stages, config, groups)
    data = RunData(Objective(config), reader, {"valid": reader})
    return Run(config, context.device, groups, stages, optimizer, data)


def save(root: Path, progress: Progress, run: Run, *, weights_only: bool = False) -> None:
    """Write the result of `state_to_save`; return when it is written."""
    save_checkpoint(root, progress.iteration, *state_to_save(run, progress, weights_only=weights_only))


def state_of(run: Run) -> RankBytes:
    """Bytes that a run holds on this rank."""
    states = run.optimizer.adam.manager
    return RankBytes(
        run.optimizer.param_buffer.num_bytes,
        sum(flat.nbytes for flat in run.optimizer.grad_buffer._flats),
        states.total_bytes(on_host=False) + states.total_bytes(on_host=True),
    )


def resume_seeded_run(config: RunConfig) -> Run:
    """Return a seeded run, resumed from the newest checkpoint in its folder if there is one."""
    run = build_seeded_run(config)
    root = checkpoint_root(config)
    progress = find_progress(root)
    if progress is not None:
        resume(run, root, progress)
        run.start_iteration = progress.iteration
    return run


def train(config: RunConfig, hf_folder: Path | None = None) -> list[StepResult]:
    """Train all iterations in this job; see `train_run`."""
    results = train_run(build_seeded_run(config, hf_folder))
    new_job()
    return results


def train_run(run: Run) -> list[StepResult]:
    """Train all iterations; return the results, with the loss on every rank, and last the validation loss."""
    results = []
    for iteration in range(run.config.training.train_iters):
        with no_stale_reads(run.optimizer):
            result = train_step(run, iteration)
        results.append(result._replace(loss=max_over_world([result.loss], run.device)[0]))
    with no_stale_reads(run.optimizer):
        valid_loss = evaluate(run)["valid_loss"]
    return [*results, results[-1]._replace(loss=valid_loss)]


def token_mean(model: Any, config: RunConfig, iteration: int) -> torch.Tensor:
    """Return the mean loss over the learned tokens of a seeded batch."""
    batches, device = seeded_batches(config, iteration), model.device
    fields = ("tokens", "labels", "loss_mask")
    tokens, labels, mask = (torch.cat([getattr(batch, name) for batch in batches]) for name in fields)
    logits = model(tokens.to(device)).logits.flatten(0, 1)
    each = torch.nn.functional.cross_entropy(logits, labels.flatten().to(device), reduction="none")
    return (each * mask.flatten().to(device)).sum() / mask.sum()


def transformers_steps(
    config: RunConfig,
    folder: Path,
    device: torch.device = CPU.device,
    loss_of: Callable[[Any, RunConfig, int], torch.Tensor] = token_mean,
) -> tuple[list[float], list[float], Any]:
    """Train transformers' model in fp32 with torch's AdamW; return losses, norms, and the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    for name, weight in model.named_parameters():
        weight.requires_grad_(config.selection.trains(name))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses, norms = [], []
    for iteration in range(config.training.train_iters):
        loss = loss_of(model, config, iteration)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration + 1, config.training.train_iters, config.optimizer)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, config.optimizer.clip_grad).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint without random generators, read by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        key: torch.full(stored.size, -1, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and not key.startswith("random.")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def hf_gradients(stages: list[LlamaModel], config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the `.grad` of these stages' trained parameters at TP=1, by Hugging Face or PEFT name."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    adapter = config.adapter if config.adapter.lora_rank else None
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.grad
    found = {}
    for weight in mapped_parameters(stages, config.model, tp_size=1, adapter=adapter):
        if weight.mapping.is_buffer:
            continue
        tensors = weight.mapping.megatron_to_hf([weight.parameter])
        found |= {tensor.name: value for tensor, value in zip(weight.mapping.hf, tensors, strict=True)}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def bits_of_steps(run: Run) -> list[Any]:
    """Return losses, norms and gradients of two steps, and the weights after them."""
    found: list[Any] = []
    for iteration in range(2):
        result = train_step(run, iteration)
        shards = (bucket.shard for bucket in run.optimizer.grad_buffer.buckets)
        found.append((result.loss, result.grad_norm, digest_of(shards)))
    run.optimizer.finish_param_sync()
    return [*found, digest_of(p for stage in run.stages for p in stage.parameters())]


def digests(run: Run) -> tuple[str, str]:
    """Return digests of all weights and of all optimizer states of this rank."""
    adam = run.optimizer.adam
    states = (
        on_host(state)
        for name in adam.dtypes
        for index, shard in enumerate(adam.shards)
        for first, last, *_ in shard.ranges
        for _, state in adam.state(name, index, first, last)
    )
    with run.optimizer.full_weights():
        return digest_of(p for stage in run.stages for p in stage.parameters()), digest_of(states)


@contextmanager
def saved_for_backward(found: dict[int, torch.UntypedStorage]) -> Iterator[None]:
    """Record the memory that autograd saves within the context, each storage once."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
