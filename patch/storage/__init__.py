"""What lies on disk, and who writes there; see README.md."""
