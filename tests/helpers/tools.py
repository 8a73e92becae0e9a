"""Tools of a chat API, for tests."""

from __future__ import annotations

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Looks a name up.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
]
