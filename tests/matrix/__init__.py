"""Environments nobody here wrote, played through distaff's adapter: python -m tests.matrix."""
