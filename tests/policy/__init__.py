"""Tests of `llamagym/policy`."""
