"""Tests of `llamagym/agent`."""
