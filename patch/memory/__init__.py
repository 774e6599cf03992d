"""Memory of an offload device and of the host, and copies between them; see README.md."""
