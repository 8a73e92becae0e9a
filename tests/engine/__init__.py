"""Tests of `llamagym/engine`."""
