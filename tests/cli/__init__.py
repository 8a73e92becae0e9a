"""Tests of `llamagym/cli`."""
