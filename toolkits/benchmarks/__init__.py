"""Benchmarks. Each module without a leading underscore is one; `make bench` runs all. See README.md."""
