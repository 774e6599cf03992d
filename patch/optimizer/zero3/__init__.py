"""Units of parameters that are gathered for a pass and freed after it (ZeRO-3)."""
