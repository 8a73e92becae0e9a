"""Tests of llamagym."""
