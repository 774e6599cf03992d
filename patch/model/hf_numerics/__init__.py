"""Layers with the order of operations of Hugging Face transformers (--precision-align)."""
