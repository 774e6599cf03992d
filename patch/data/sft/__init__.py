"""Fine-tuning sets: tokenized, cached and packed samples."""
