"""From nothing to a fine-tuned LLaMA that answers held-out questions: `python -m toolkits.quickstart`."""
