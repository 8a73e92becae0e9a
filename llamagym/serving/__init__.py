"""Serving: an agent behind OpenAI's chat completions API, in use and in training."""

from .server import ChatAgent, serve

__all__ = ["ChatAgent", "serve"]
