"""A run's report: one HTML page that needs nothing else."""

from .page import write_report

__all__ = ["write_report"]
