"""Text and token ids: chat templates, episodes, parsing, demonstrations."""
