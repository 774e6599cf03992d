"""Thin command lines over patch; each has --help."""
