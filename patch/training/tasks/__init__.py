"""Tasks of lm-evaluation-harness on the model of a run; see README.md."""
