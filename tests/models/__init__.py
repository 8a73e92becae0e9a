"""Tests of `llamagym/models`."""
