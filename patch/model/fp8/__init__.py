"""fp8 products: scales, casts, kernels, and Transformer Engine's scales."""
