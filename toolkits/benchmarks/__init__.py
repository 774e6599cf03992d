"""Benchmarks: each module without a leading underscore is one, `make bench` runs all; see README.md."""
