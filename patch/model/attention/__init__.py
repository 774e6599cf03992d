"""Attention: core attention, RoPE and ALiBi, latent attention, context parallelism."""
