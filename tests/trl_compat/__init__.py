"""Tests of `llamagym/trl_compat`."""
