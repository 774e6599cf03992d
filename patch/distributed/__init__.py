"""Process groups and collectives; see README.md."""
