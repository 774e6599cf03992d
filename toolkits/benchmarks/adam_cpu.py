"""Compares the Adam update on a CPU: ours, torch's fused kernel and DeepSpeed's CPUAdam.

    python -m toolkits.benchmarks.adam_cpu [--quick] [--json FILE] [--plot FILE]

All contenders update the same tensors of 100 million elements in one process, one after the other, in rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch.optim.adamw import adamw

from patch.config.choices import MOMENT_BLOCK
from patch.optimizer.kernels import AdamScalars, AdamStates, UpdateItem
from patch.optimizer.kernels.build import BuildError
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.narrow import Draw
from patch.optimizer.kernels.numpy_adam import low_bits, round_to_bf16
from toolkits.benchmarks._measure import Rounds, take_turns
from toolkits.benchmarks._report import Aim, NotRunError, Report, run_benchmark

_NUMEL = 99_999_936
SCALARS = AdamScalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
# Elements that a peer casts, updates and casts back at a time, so that the casts stay in a shared cache.
_CHUNK = 1 << 22


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; a missing DeepSpeed is named."""
    return run_benchmark(_run, argv, rounds=(31, 9), quick="fewer rounds: about a third of the time")


def _run(arguments: argparse.Namespace) -> Report:
    try:
        found, missing = contenders(Tensors(_NUMEL))
    except BuildError as reason:
        raise NotRunError(reason) from reason
    threads, by_title = torch.get_num_threads(), {one.title: one for one in found}
    for contender in found:
        contender.update()
    timed = {title: partial(_milliseconds, one) for title, one in by_title.items()}
    times = Rounds(take_turns(timed, arguments.rounds), unit="ms", digits=1)

    def over_ours(title: str) -> str:
        case = by_title[title].case
        return "" if case == "copy" else f"{times.ratio(title, f'{case}: ours'):.2f}"

    def speed(title: str) -> str:
        return f"{by_title[title].num_bytes * _NUMEL / median(times.values[title]) / 1e6:.1f}"

    head = f"{_NUMEL / 1e6:.0f} M parameters, {threads} threads, {arguments.rounds} rounds\n"
    text = f"{head}\n{times.table('', 'copy: copy', {'GB/s': speed, '/ ours': over_ours})}{missing}"
    rounds = {title: [one / 1e3 for one in found] for title, found in times.values.items()}
    content = {"numel": _NUMEL, "threads": threads, "rounds": rounds, "missing": missing}
    return Report(text, _aims(times), [times.panel()], content)


def _milliseconds(contender: Contender) -> float:
    begin = time.perf_counter()
    contender.update()
    return 1e3 * (time.perf_counter() - begin)


def _aims(times: Rounds) -> list[Aim]:
    """The thresholds of the issue, as ratios of times."""
    peers = [name for name in ("torch fused", "DeepSpeed") if f"fp32: {name}" in times.values]
    rival = times.best(*(f"fp32: {name}" for name in peers))
    aims = [Aim(f"fp32: ours / best peer ({rival})", times.ratio("fp32: ours", rival), 1 / 0.98)]
    for peer in peers:
        rival = times.best(f"bf16: {peer}")
        aims.append(Aim(f"bf16: ours / {rival}", times.ratio("bf16: ours", rival), 1 / 1.4))
    split = times.ratio("bf16: ours, split master", "bf16: ours")
    aims.append(Aim("bf16: ours, split master / ours", split, 1 / 1.1))
    for case, ours in (("fp32", "ours"), ("bf16", "ours, split master")):
        for moments, bound in (("bf16", 0.8), ("8-bit", 0.7)):
            ratio = times.ratio(f"{case}: {ours}, {moments} moments", f"{case}: {ours}")
            aims.append(Aim(f"{case}: {moments} moments / fp32 moments", ratio, bound))
    return aims


class Contender(NamedTuple):
    """One way to update all parameters."""

    case: str
    name: str
    num_bytes: int
    """Bytes that one update must read and write per parameter; additional traffic is not counted."""
    update: Callable[[], object]

    @property
    def title(self) -> str:
        """Case and name."""
        return f"{self.case}: {self.name}"


class Tensors:
    """The tensors that all contenders share, each (numel,), so that 100 M parameters fit in 4 GB."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(numel).mul_(0.02)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.grad = torch.randn(numel).mul_(1e-3)
        self.grad_bf16 = self.grad.bfloat16()
        bits = [split(self.master.numpy()) for split in (round_to_bf16, low_bits)]
        weight, self.low_bits = (torch.from_numpy(half.view(np.int16)) for half in bits)
        self.weight = weight.view(torch.bfloat16)
        halves = [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)]
        self.bf16_moments = halves[0], halves[1]
        bytes_ = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
        self.byte_moments = bytes_[0], bytes_[1]
        self.scales = [torch.zeros(numel // MOMENT_BLOCK) for _ in range(2)]


def contenders(tensors: Tensors) -> tuple[list[Contender], str]:
    """All contenders that can run here, and a message if one is missing."""
    found = [Contender("copy", "copy", 8, lambda: tensors.grad.copy_(tensors.master)), *_ours(tensors)]
    found += _peer("torch fused", _torch_fused, tensors)
    try:
        found += _peer("DeepSpeed", _deepspeed(), tensors)
    except Exception as reason:  # its extension is compiled at first use, which can fail in many ways
        return found, f"missing: DeepSpeed's CPUAdam ({type(reason).__name__}: {reason})"
    return found, ""


def _ours(t: Tensors) -> list[Contender]:
    kernel = CppAdam()
    fp32 = UpdateItem(t.grad, AdamStates(t.master, t.exp_avg, t.exp_avg_sq), SCALARS)
    bf16 = UpdateItem(t.grad_bf16, AdamStates(t.master, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    split = UpdateItem(t.grad_bf16, AdamStates(t.low_bits, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    draw = Draw("weight", 0, t.grad.numel(), 0)
    found = [
        Contender("fp32", "ours", 28, lambda: kernel.update([fp32])),
        Contender("bf16", "ours", 28, lambda: kernel.update([bf16])),
        Contender("bf16", "ours, split master", 26, lambda: kernel.update([split])),
    ]
    for whole, item in ((found[0], fp32), (found[2], split)):
        master, *_, param = item.states[:4]
        halves = AdamStates(master, *t.bf16_moments, param)
        eight = AdamStates(master, *t.byte_moments, param, *t.scales)
        for moments, states, saved in (("bf16", halves, 8), ("8-bit", eight, 12)):
            update = partial(kernel.update, [item._replace(states=states, draw=draw)])
            title, num_bytes = f"{whole.name}, {moments} moments", whole.num_bytes - saved
            found.append(Contender(whole.case, title, num_bytes, update))
    return found


# param, grad, exp_avg, exp_avg_sq: all float32, updated in place.
_Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _peer(name: str, update: _Update, t: Tensors) -> list[Contender]:
    """A kernel for one type only: in bf16 it needs casts before and after, of everything or in chunks."""
    states = (t.master, t.exp_avg, t.exp_avg_sq)
    chunks = list(zip(*(x.split(_CHUNK) for x in (*states, t.grad_bf16, t.weight)), strict=True))
    scratch = torch.empty(_CHUNK)

    def chunked() -> None:
        for master, exp_avg, exp_avg_sq, grad, weight in chunks:
            cast = scratch[: grad.numel()].copy_(grad)
            update(master, cast, exp_avg, exp_avg_sq)
            weight.copy_(master)

    def flat() -> None:
        update(t.master, t.grad.copy_(t.grad_bf16), t.exp_avg, t.exp_avg_sq)
        t.weight.copy_(t.master)

    return [
        Contender("fp32", name, 28, lambda: update(t.master, t.grad, t.exp_avg, t.exp_avg_sq)),
        Contender("bf16", f"{name}, casts in chunks", 28, chunked),
        Contender("bf16", f"{name}, casts of all", 28, flat),
    ]


def _torch_fused(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> None:
    step = torch.tensor(SCALARS.step - 1.0)  # of the previous update; adamw increments it
    adamw(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step], fused=True, amsgrad=False,
        beta1=SCALARS.beta1, beta2=SCALARS.beta2, lr=SCALARS.lr, weight_decay=SCALARS.weight_decay,
        eps=SCALARS.eps, maximize=False,
    )  # fmt: skip


def _deepspeed() -> _Update:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    s = SCALARS
    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=True)
    library, index = optimizer.ds_opt_adam, optimizer.opt_id

    def update(param: torch.Tensor, *others: torch.Tensor) -> None:
        library.adam_update(
            index, s.step, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, True, param, *others
        )

    # Keeps the optimizer alive, whose destructor frees the kernel's state.
    update.optimizer = optimizer  # type: ignore[attr-defined]
    return update


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
