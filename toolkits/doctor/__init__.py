"""Short checks of a machine and its software: `llama-patch doctor`."""
