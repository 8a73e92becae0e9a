"""Tests of the repository: examples."""
