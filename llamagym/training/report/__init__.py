"""The report of runs: one HTML page that needs no other file and no network."""

from .page import write_report

__all__ = ["write_report"]
