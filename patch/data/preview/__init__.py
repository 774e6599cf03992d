"""Shows the samples of a set as tokens, learned and not learned, and figures of the set; see README.md."""
