"""Buffer groups, buckets of gradients, and flat parameters that are gathered after an update."""
