"""Tests of the repository as a whole: pages, rules, packaging."""
