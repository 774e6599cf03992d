"""The loss from logits that exist: for whoever asks for each token's loss, and for `--precision-align`.

Training uses `linear_cross_entropy` instead. The aligned functions follow Hugging Face's order of operations,
otherwise the cross entropy is upstream's vocabulary-parallel one.

Shapes: S sequence, B micro-batch, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def hide_padded_vocabulary(logits: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Logits whose softmax is that of the real vocabulary.

    Args:
        logits: [S, B, V / TP], over the padded vocabulary; changed in place if they are contiguous.
        num_rows: rows of the real vocabulary on this TP rank.
    Returns:
        Logits of the same shape, with the dtype's lowest number in the padding.
    """
    logits = logits.contiguous()
    # Detached, because autograd would copy the gradient of all logits for this assignment. It is not needed:
    # the softmax of the padding is zero, and so is its gradient.
    logits.detach()[..., num_rows:] = torch.finfo(logits.dtype).min
    return logits


def aligned_losses(labels: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cross entropy in float32 over the real vocabulary, in Hugging Face's order of operations.

    Args:
        labels: [B, S].
        logits: [S, B, padded V].
        vocab_size: rows of the real vocabulary.
    Returns:
        [B, S] float32.
    """
    flat = logits[..., :vocab_size].transpose(0, 1).float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)


def sum_aligned(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the learned tokens' losses in the order of torch's own loss function, Hugging Face's.

    Args:
        losses: [B, S].
        mask: [B, S], 1 for a learned token, else 0.
    """
    ignored = torch.where(mask > 0, 0, -100)
    return F.nll_loss(-losses.reshape(-1, 1), ignored.flatten(), ignore_index=-100, reduction="sum")
