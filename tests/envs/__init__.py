"""Tests of `llamagym/envs`."""
