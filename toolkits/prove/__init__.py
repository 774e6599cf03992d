"""Compare a shrunk run with a single-process run, before the real run starts: `llama-patch prove`."""
