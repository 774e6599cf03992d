"""The names of files on disk, atomic writes, checksums and locks; see README.md."""
