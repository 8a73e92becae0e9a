"""Tests of `llamagym/saving`."""
