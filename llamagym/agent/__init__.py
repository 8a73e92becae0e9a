"""The agent: what a user subclasses, and everything between an episode's rewards and an update."""

from .agent import Agent

__all__ = ["Agent"]
