"""Tests of the repository: project."""
