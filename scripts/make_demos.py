"""Write demonstrations of Blackjack: conversations of one turn, in chat format, from basic strategy with some noise.

python scripts/make_demos.py        writes sft_data/demo_blackjack.jsonl

States come as often as the strategy meets them. One reply in ten is drawn at random: demonstrations show the format and
most of the strategy, and leave something to learn.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from blackjack import BlackjackAgent
from blackjack_exact import STATES, optimal_policy, state_visit_probabilities

ROOT = Path(__file__).resolve().parent.parent
COUNT, NOISE, SEED = 500, 0.1, 0
WORDS = ("stick", "hit")


def demonstrations() -> list[dict[str, object]]:
    """Conversations as `{"messages": [system, user, assistant]}`."""
    rng = random.Random(SEED)
    best = optimal_policy()
    visits = state_visit_probabilities(best)
    # Its prompts need no model.
    prompts = BlackjackAgent.__new__(BlackjackAgent)
    system = {"role": "system", "content": prompts.get_system_prompt()}
    rows: list[dict[str, object]] = []
    for state in rng.choices(STATES, [visits[state] for state in STATES], k=COUNT):
        action = rng.randrange(2) if rng.random() < NOISE else best[state]
        user = {"role": "user", "content": prompts.format_observation(state)}
        rows.append({"messages": [system, user, {"role": "assistant", "content": WORDS[action]}]})
    return rows


def main() -> None:
    """Write the file."""
    path = ROOT / "sft_data" / "demo_blackjack.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in demonstrations()), encoding="utf-8")


if __name__ == "__main__":
    main()
