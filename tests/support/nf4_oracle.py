"""NF4 in NumPy: the levels of the QLoRA paper, and the nearest level to each value divided by its absmax."""

from statistics import NormalDist

import numpy as np

_OFFSET = 0.9677083
"""The largest quantile, between 1 - 1 / 30 and 1 - 1 / 32 (arXiv:2305.14314, appendix E)."""


def levels() -> np.ndarray:
    above = [NormalDist().inv_cdf(q) for q in np.linspace(_OFFSET, 0.5, 9)[:-1]]
    below = [-NormalDist().inv_cdf(q) for q in np.linspace(_OFFSET, 0.5, 8)[:-1]]
    found = np.sort([*above, 0, *below])
    return (found / found.max()).astype(np.float32)


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a float32 tensor, and the scale of each block of 64."""
    blocks = weight.reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1)
    shares = blocks / np.maximum(scales, 1e-38)[:, None]
    return np.abs(shares[..., None] - levels()).argmin(-1).reshape(weight.shape), scales


def rounded(weight: np.ndarray) -> np.ndarray:
    """Return a float32 tensor rounded to nf4."""
    codes, scales = quantized(weight)
    return (levels()[codes].reshape(-1, 64) * scales[:, None]).reshape(weight.shape)
