"""The agent: the class that users subclass, how it acts, and how its episodes become batches."""

from .agent import Agent

__all__ = ["Agent"]
