"""Helpers that several tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
