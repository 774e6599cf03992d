"""Preview of training data: rows as tokens, trained or not, and figures of the data sets; see README.md."""
