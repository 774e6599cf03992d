"""Train a small LLaMA that answers held-out questions: `python -m toolkits.quickstart`."""
