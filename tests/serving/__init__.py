"""Tests of `llamagym/serving`."""
