"""Samplers that are servers: they write replies in free text over HTTP, with the adapter that is being learned."""

from .llama_cpp import LlamaCppSampler
from .vllm import VLLMSampler

__all__ = ["LlamaCppSampler", "VLLMSampler"]
