"""Tests of `llamagym/training`."""
