"""Expert choices of transformers' model, recorded and replayed in our model.

If two experts of a token have nearly the same score, rounding decides between them, and everything after that
differs. With transformers' choices in both models, only wrong weights cause such differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from patch.families import ModelConfig, stacked_part, weight_rows
from patch.model import LlamaModel

Topk = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Recording = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
"""Layer -> for each prompt the experts of each token [S, topk], and the router's logits [S, experts]."""


class RouteComparison(NamedTuple):
    """Our routers' choices compared with those of transformers; field names are keys of the JSON report."""

    tokens: int
    """Number of tokens over all prompts and layers."""
    differing: int
    """Tokens for which our routers choose other experts."""
    largest_gap: float
    """Largest gap between the transformers logits of the two choices, as a share of the layer's largest
    logit; 0 is a tie. Router inputs are normed, so rounding moves all logits by a similar amount, even
    small ones."""


@contextmanager
def recorded(theirs: torch.nn.Module, model: ModelConfig) -> Iterator[Recording]:
    """Record the expert choices of transformers' model; the recording is empty without experts."""
    found: Recording = {}
    with ExitStack() as stack:
        for row in weight_rows(model):
            if row.name.endswith(".router.weight"):
                (name,) = row.hf
                stacked = stacked_part(name)
                path = (stacked.name if stacked else name).removesuffix(".weight")
                for layer in row.layers:
                    module = theirs.get_submodule(path.replace("*", str(layer)))
                    hook = module.register_forward_hook(_recorder(found.setdefault(layer, [])))
                    stack.callback(hook.remove)
        yield found


def _recorder(passes: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        logits, _, chosen = output
        bias = getattr(module, "e_score_correction_bias", None)
        logits = logits if bias is None else logits.sigmoid() + bias  # DeepSeek-V3 compares these
        passes.append((chosen, logits.float()))

    return record


class _Replay:
    """Replay of recorded experts in upstream's router (moe/router_replay.py), which compares our choices.

    `own` is the router's previous replay, or None if the router chooses by itself.
    """

    def __init__(self, passes: Sequence[tuple[torch.Tensor, torch.Tensor]], own: Any) -> None:
        self._passes, self._own = iter(passes), own
        self._largest = max(logits.abs().max().item() for _, logits in passes)
        self.compared = RouteComparison(0, 0, 0.0)

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Topk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return our `scores` [S, experts] of transformers' experts, and their indices, both [S, topk].

        `choose` is the router's own choice.
        """
        chosen, logits = next(self._passes)
        question, none = (scores, topk, num_groups, group_topk), torch.zeros_like(logits, dtype=torch.bool)
        _, own = self._own.get_replay_topk(*question, choose) if self._own else choose(*question)
        theirs, ours = (none.scatter(1, experts, True) for experts in (chosen, own))
        missed, other = (logits.where(kept, -torch.inf).amax(1) for kept in (theirs & ~ours, ours & ~theirs))
        differs = (ours != theirs).any(1)
        gaps = ((missed - other) / self._largest)[differs]
        tokens, differing, largest = self.compared
        self.compared = RouteComparison(
            tokens + len(logits), differing + int(differs.sum()), max([largest, *gaps.abs().tolist()])
        )
        return scores.gather(1, chosen), chosen


@contextmanager
def replayed(ours: LlamaModel, recording: Recording, prompts: slice = slice(None)) -> Iterator[list[_Replay]]:
    """Make our model use the recorded expert choices of transformers' model on these prompts.

    Yields:
        a replay per expert layer; its `compared` holds the comparison after the passes.
    """
    replays: list[_Replay] = []
    with ExitStack() as stack:
        for layer, passes in recording.items():
            router = ours.decoder.layers[layer].mlp.router
            stack.callback(setattr, router, "router_replay", router.router_replay)
            replays.append(_Replay(passes[prompts], router.router_replay))
            router.router_replay = replays[-1]
        yield replays


def summed(replays: Sequence[_Replay]) -> RouteComparison | None:
    """Return the comparison over all layers, or None if no layer has experts."""
    if not replays:
        return None
    tokens, differing, gaps = zip(*(replay.compared for replay in replays), strict=True)
    return RouteComparison(sum(tokens), sum(differing), max(gaps))
