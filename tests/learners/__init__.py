"""Tests of `llamagym/learners`."""
