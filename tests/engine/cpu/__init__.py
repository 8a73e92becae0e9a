"""Tests of `llamagym/engine/cpu`."""
