"""Benchmarks: each module without a leading underscore is one, run by `make bench`; see README.md."""
