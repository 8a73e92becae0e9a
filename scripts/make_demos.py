"""Write demonstrations: conversations of one turn, in chat format, one a line.

python scripts/make_demos.py        writes every file of FILES into sft_data/

- demo_blackjack.jsonl: basic strategy; one reply in ten is drawn at random. States come as often as the strategy meets
  them. Shows the format and most of the strategy, and leaves something to learn.
- format_blackjack.jsonl: replies drawn at random, whatever the state. Shows the format and nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from blackjack import BlackjackAgent
from blackjack_exact import STATES, optimal_policy, state_visit_probabilities

from llamagym import Agent

ROOT = Path(__file__).resolve().parent.parent
NOISE, SEED = 0.1, 0
WORDS = ("stick", "hit")

Demonstrations = list[dict[str, object]]


def conversation(kind: type[Agent], observation: Any, reply: str) -> dict[str, object]:
    """One turn as `{"messages": [system, user, assistant]}`, in the words of an agent's class."""
    # Its prompts need no model.
    prompts: Any = kind.__new__(kind)
    contents = prompts.get_system_prompt(), prompts.format_observation(observation), reply
    roles = "system", "user", "assistant"
    return {"messages": [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]}


def demonstrations(count: int = 500) -> Demonstrations:
    """Blackjack by basic strategy, with some noise."""
    rng = random.Random(SEED)
    best = optimal_policy()
    visits = state_visit_probabilities(best)
    rows: Demonstrations = []
    for state in rng.choices(STATES, [visits[state] for state in STATES], k=count):
        action = rng.randrange(2) if rng.random() < NOISE else best[state]
        rows.append(conversation(BlackjackAgent, state, WORDS[action]))
    return rows


def blackjack_format(count: int = 256) -> Demonstrations:
    """Blackjack with random replies, each word as often as the other, in states of all kinds."""
    rng = random.Random(SEED)
    words = [WORDS[index % len(WORDS)] for index in range(count)]
    rng.shuffle(words)
    return [conversation(BlackjackAgent, rng.choice(STATES), word) for word in words]


FILES: dict[str, Callable[[], Demonstrations]] = {
    "demo_blackjack.jsonl": demonstrations,
    "format_blackjack.jsonl": blackjack_format,
}


def main() -> None:
    """Write the files."""
    folder = ROOT / "sft_data"
    folder.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in make()), encoding="utf-8")


if __name__ == "__main__":
    main()
