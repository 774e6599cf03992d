"""Numbers of bytes as people read them."""


def size_text(num_bytes: int) -> str:
    """1.25 GiB, or 3.20 MiB where it is less than 0.01 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes / 2**20:.2f} MiB"
