"""Adam states in chunks: where they are placed and how they are updated there."""
