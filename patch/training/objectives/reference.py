"""Reference of an objective: the log-probabilities of all sequences under the run's start weights.

The gain of a sequence is the sum of the log-probabilities of its learned tokens, minus the same sum under the
run's start weights. The sums under the start weights are the reference. They are computed once, with the
kernels and rows of training, and kept beside the token cache:

    CACHE/references/KEY            SHA-256, then float32 [2 N]: of all sequences of a set
    RUN/reference.json              the KEY of each set, by the hash of its tokens

KEY is a checksum of the start weights, then a hash of the set's tokens and of the settings that decide the
bits of a sum. So a run with another learning rate reads the same reference; another TP size computes its own.
A resumed run reads its original reference at any layout. If it is gone, the start weights are loaded again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patch.config.schema import RunConfig
from patch.data import Batch, DataSets
from patch.data.packing import PairSource
from patch.data.sft.options import user_cache
from patch.distributed.collectives import from_rank_0
from patch.errors import CheckpointError, DataError
from patch.logger import get_logger
from patch.progress import LineTimer
from patch.storage.atomic import write_record
from patch.storage.names import DATA_CACHE_FOLDER, REFERENCE_FILE
from patch.storage.text_files import read_json, read_small
from patch.training.evaluation import evaluating, forward_only, global_batches
from patch.training.objectives.objective import Objective
from patch.training.run_state import base_checksum, checksum

if TYPE_CHECKING:
    from patch.training.setup import Run

_FOLDER = "references"
_HASH_BYTES = 32
_KEY = re.compile("[0-9a-f]{16}-[0-9a-f]{32}")
_logger = get_logger(__name__)


class ReferenceObjective(Objective):
    """An objective that compares each sequence with its log-probability under the start weights."""

    has_token_losses = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.sets: Sequence[PairSource] = ()
        """All sets; their sequences are numbered consecutively."""
        self.reference = torch.zeros(0)
        """float32 [total sequences]: the reference sum of each sequence, by sequence number."""
        output = Path(config.checkpoint.output_path)
        self._cache = Path(config.data.cache_dir or user_cache(output / DATA_CACHE_FOLDER)) / _FOLDER
        self._keys_file = output / REFERENCE_FILE

    def build_datasets(self, tokenizer: Any, num_train_samples: Callable[[int], int]) -> DataSets:
        """See `Objective`."""
        sets = super().build_datasets(tokenizer, num_train_samples)
        self.sets = sets.pairs
        return sets

    def goes_on(self, run: Run) -> bool:
        """Return whether the original reference of a resumed run is available."""
        found = from_rank_0(self._all_stored)
        values = [each for each in found if each is not None]
        if len(values) == len(self.sets):
            self.reference = torch.cat(values).to(run.device)
        return len(values) == len(self.sets)

    def prepare(self, run: Run) -> None:
        """Read the reference, or compute it with the current weights.

        Raises:
            CheckpointError: a resumed run began with other or unknown weights, or its keys cannot be written.
            DataError: the reference cannot be written.
        """
        super().prepare(run)
        size = sum(2 * len(each.sizes) for each in self.sets)
        if len(self.reference) == size:
            return
        of_weights = base_checksum if run.config.adapter.starts_at_base else checksum
        weights = of_weights(run)
        if run.start_iteration:
            self._check(weights, from_rank_0(partial(_keys_in, self._keys_file)))
        keys, values = {}, []
        self.reference = torch.zeros(size, device=run.device)
        for source in self.sets:
            key = keys[source.source.fingerprint] = f"{weights}-{self._conditions(source)}"
            found = from_rank_0(partial(self._stored, key, source))
            if found is None:
                found = self._computed(run, source)
                content = found.numpy().tobytes()
                kept = sha256(content).digest() + content
                from_rank_0(partial(write_record, self._cache / key, kept, DataError, "cache_dir"))
            values.append(found.to(run.device))
        self.reference = torch.cat(values)
        from_rank_0(partial(write_record, self._keys_file, json.dumps(keys, indent=1) + "\n"))

    def values(self, sums: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what the sums of a batch's n sequences [n] have gained on the reference."""
        return sums - self.reference[batch.of_sequences["number"]]

    def passes(self, batches: list[Batch]) -> list[list[Batch]]:
        """Return the micro-batches whose sequences have a reference."""
        return [batches]

    def _computed(self, run: Run, source: PairSource) -> torch.Tensor:
        """Compute the sums [2 N] of a set's sequences in one pass over the set; the same on all ranks."""
        groups, name, timer = run.groups, source.name, LineTimer()
        work, reader = f"reference of {name}", self.reader(source, run.groups)
        values = torch.zeros(len(self.reference), device=run.device)
        with evaluating(run):
            for batches, _ in global_batches(run, reader, name, work=work):
                for own in self.passes(batches):
                    for batch, report in zip(own, forward_only(run, own), strict=False):
                        is_real = batch.of_sequences["sign"] != 0
                        values[batch.of_sequences["number"][is_real].to(run.device)] = report["sums"][is_real]
        if groups.tp.rank() or groups.cp.rank():
            values.zero_()  # TP rank 0, CP rank 0 has the same values; stages before the last have none
        torch.distributed.all_reduce(values)
        _logger.info("%s: %d %s in %.0f s", work, len(source.sizes), self.unit, timer.elapsed_s())
        return values[source.first : source.first + 2 * len(source.sizes)].cpu()

    def _conditions(self, source: PairSource) -> str:
        """Hash a set's tokens and the settings that decide the bits of their sums."""
        config, parallel = self.config, self.config.parallel
        decides = (
            source.source.fingerprint, config.training.precision, config.model.precision_align,
            config.data.packing, config.training.micro_batch_size, parallel.tensor_model_parallel_size,
            parallel.context_parallel_size, config.training.deterministic_mode,
        )  # fmt: skip
        return sha256(repr(decides).encode()).hexdigest()[:32]

    def _check(self, weights: str, keys: Mapping[str, str]) -> None:
        if not keys:
            raise CheckpointError(
                f"{self._keys_file} is not there or cannot be read; expected that of the run that is "
                "resumed: it says with which weights the run began. Bring it from that run's folder, or "
                "start another run from the checkpoint (--load, position 22)",
                field="output_path",
            )
        if then := next((key for key in keys.values() if not key.startswith(weights)), None):
            raise CheckpointError(
                f"{self._keys_file}: the run began with weights whose checksum is {then.partition('-')[0]}. "
                f"Their reference is missing in {self._cache}, and --load now gives {weights}; expected the "
                "same weights in the same precision",
                field="load",
            )

    def _all_stored(self) -> list[torch.Tensor | None]:
        keys = _keys_in(self._keys_file)
        return [self._stored(keys.get(each.source.fingerprint), each) for each in self.sets]

    def _stored(self, key: str | None, source: PairSource) -> torch.Tensor | None:
        """Return the reference of a set under a key, or None if it is missing or damaged."""
        file, size = self._cache / str(key), _HASH_BYTES + 8 * len(source.sizes)
        if key is None or not os.path.lexists(file):
            return None
        try:
            content = read_small(file, size)
        except OSError:
            content = b""
        if len(content) != size or sha256(content[_HASH_BYTES:]).digest() != content[:_HASH_BYTES]:
            _logger.warning("%s is damaged: it is made again", file)
            return None
        return torch.from_numpy(np.frombuffer(content, np.float32, offset=_HASH_BYTES).copy())


def _keys_in(file: Path) -> dict[str, str]:
    """Return the keys in reference.json; {} if the file is missing or unreadable."""
    try:
        return {name: key for name, key in read_json(file).items() if _KEY.fullmatch(str(key))}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
