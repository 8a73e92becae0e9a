"""Tests of `llamagym/text`."""
