"""Tests of the repository: scripts."""
