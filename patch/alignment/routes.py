"""Which experts transformers' model chooses: recorded, and replayed in ours.

Where two experts of a token have nearly the same score, rounding decides between them, and then all that
follows differs. With transformers' choices in both models only wrong weights do that.
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
"""By layer, for each prompt: the experts of each token [S, topk], and the router's logits [S, experts]."""


class RouteComparison(NamedTuple):
    """Choices of our routers beside those of transformers; the fields are keys of the JSON report."""

    tokens: int
    """Over all prompts and layers."""
    differing: int
    """Tokens that would go to other experts."""
    largest_gap: float
    """How much larger transformers' logit is of the expert that it chooses instead, at most: a share of the
    layer's largest logit; 0 is a tie. What routers are given is normed, so rounding moves the logits of all
    tokens alike, also where they happen to be small."""


@contextmanager
def recorded(theirs: torch.nn.Module, model: ModelConfig) -> Iterator[Recording]:
    """Record the choices of transformers' model; empty without experts.

    Args:
        theirs: transformers' model.
        model: its shape.
    """
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
        passes.append((chosen, logits.float()))

    return record


class _Replay:
    """Gives upstream's router the experts of a pass (moe/router_replay.py) and compares its own choice.

    Args:
        passes: what was recorded.
        own: the object that the router asks otherwise; None: it chooses itself.
    """

    def __init__(self, passes: Sequence[tuple[torch.Tensor, torch.Tensor]], own: Any) -> None:
        self._passes, self._own = iter(passes), own
        self._largest = max(logits.abs().max().item() for _, logits in passes)
        self.compared = RouteComparison(0, 0, 0.0)

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Topk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and numbers of transformers' experts, both [S, topk].

        Args:
            scores: ours, [S, experts].
            topk, num_groups, group_topk: of the model.
            choose: finds our own.
        """
        chosen, logits = next(self._passes)
        theirs, ours = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.bool)
        theirs.scatter_(1, chosen, True)
        question = scores, topk, num_groups, group_topk
        _, own = self._own.get_replay_topk(*question, choose) if self._own else choose(*question)
        ours.scatter_(1, own, True)
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
    """Let our model choose the experts that transformers' model has chosen on the same prompts.

    Args:
        ours: our model.
        recording: of transformers' model.
        prompts: those that follow.
    Yields:
        one for each layer with experts, which has then compared the choices.
    """
    routers = {layer: ours.decoder.layers[layer].mlp.router for layer in recording}
    before = {layer: router.router_replay for layer, router in routers.items()}
    replays = {layer: _Replay(recording[layer][prompts], before[layer]) for layer in recording}
    for layer, router in routers.items():
        router.router_replay = replays[layer]
    try:
        yield list(replays.values())
    finally:
        for layer, router in routers.items():
            router.router_replay = before[layer]


def summed(replays: Sequence[_Replay]) -> RouteComparison | None:
    """The comparison over all layers; None if no layer has experts."""
    if not replays:
        return None
    tokens, differing, gaps = zip(*(replay.compared for replay in replays), strict=True)
    return RouteComparison(sum(tokens), sum(differing), max(gaps))
