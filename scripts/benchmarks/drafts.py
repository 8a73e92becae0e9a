"""Free text with and without drafts: passes, tokens and seconds for the same replies.

python scripts/benchmarks/drafts.py --tool-calls runs/clerk/agent [--dtype bfloat16] [--rounds 6]

Workloads: a story of an untrained model, Blackjack as in LlamaGym's script (untrained, whole conversations, up to 32
tokens), and tool calls of a trained agent, whose folder `examples/address_book.py --run-dir runs/clerk` writes. Each
round plays new episodes, the same with drafts and without. Replies are sampled with the same random numbers, so they
are equal but for rounding; rates are per generated token. The first round is not counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
from common import ROOT, parser_of, save

from llamagym import Agent, load_model_and_tokenizer
from llamagym.agent.agent import collector_of
from llamagym.engine.backbone import Backbone
from llamagym.envs.address_book import AddressBook

sys.path.insert(0, str(ROOT / "examples"))
from address_book import Clerk

STORY_TOKENS = 64
SCRIPT_TOKENS = 32


class Storyteller(Agent):
    """Answers each question with a story."""

    def get_system_prompt(self) -> str:
        """The task."""
        return "You are a storyteller."

    def format_observation(self, observation: str) -> str:
        """The question."""
        return observation

    def extract_action(self, response: str) -> str:
        """The story."""
        return response


class ScriptedPlayer(Agent):
    """Plays Blackjack with the prompts of LlamaGym's script."""

    def get_system_prompt(self) -> str:
        """The game, and how to name an action."""
        return (
            "You are an expert blackjack player. Every turn, you'll see your current sum, the dealer's showing card "
            "value, and whether you have a usable ace. Win by exceeding the dealer's hand but not exceeding 21. Decide "
            "whether to stay with your current sum by writing 'Action: 0' or accept another card by writing 'Action: "
            "1'. Accept a card unless very close to 21."
        )

    def format_observation(self, observation: Any) -> str:
        """The hand."""
        player, dealer, ace = observation
        return f"You: {player}. Dealer: {dealer}. You have {'an' if ace else 'no'} ace."

    def extract_action(self, response: str) -> int:
        """The digit after "Action:", or to stay."""
        return int("Action: 1" in response)


class Questions(gym.Env[str, str]):
    """Asks for one story an episode, each about another number."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question."""
        return f"Tell me a story about the number {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The end."""
        return "", 0.0, True, False, {}


@dataclass
class Counts:
    """Cost of the replies of one round.

    Attributes:
        seconds: Time of acting.
        passes: Passes of decoding.
        forwarded: Tokens that went through the model, those of prompts included.
        generated: Tokens of the replies.
    """

    seconds: float = 0.0
    passes: int = 0
    forwarded: int = 0
    generated: int = 0


def play(agent: Agent, make_env: Callable[[], gym.Env], seeds: Sequence[int]) -> Counts:
    """Plays one episode in each of several environments at once."""
    counts = Counts()
    envs = [make_env() for _ in seeds]
    observations = {env: envs[env].reset(seed=seed)[0] for env, seed in enumerate(seeds)}
    decode = Backbone.decode

    def counted(*args: Any) -> Any:
        counts.passes += 1
        return decode(*args)

    forwarded = agent.policy.tokens_forwarded
    while observations:
        numbers = list(observations)
        started = time.perf_counter()
        with patch.object(Backbone, "decode", counted):
            actions = agent.act_batch(list(observations.values()), numbers)
        counts.seconds += time.perf_counter() - started
        for env, action in zip(numbers, actions, strict=True):
            counts.generated += len(collector_of(agent).actor.conversation(env).turns[-1].reply.ids)
            observation, _, terminated, truncated, _ = envs[env].step(action)
            observations[env] = observation
            if terminated or truncated:
                agent.terminate_episodes([env])
                del observations[env]
    counts.forwarded = agent.policy.tokens_forwarded - forwarded
    return counts


def compare(agents: dict[str, Agent], make_env: Callable[[], gym.Env], envs: int, episodes: int, rounds: int) -> Any:
    """Plays with each agent in alternation; medians of all rounds but the first.

    Args:
        agents: The agents by name: "plain" and "drafts".
        make_env: Makes an environment.
        envs: Number of environments.
        episodes: Number of episodes in each environment and round.
        rounds: Number of rounds.
    """
    measured: dict[str, list[Counts]] = {name: [] for name in agents}
    for round_number in range(rounds):
        for name, agent in agents.items():
            total = Counts()
            for episode in range(episodes):
                first = (round_number * episodes + episode) * envs
                counts = play(agent, make_env, range(first, first + envs))
                total = Counts(*(getattr(total, key) + value for key, value in vars(counts).items()))
            measured[name].append(total)
    result: dict[str, Any] = {"environments": envs}
    for name, counted in measured.items():
        result[name] = {
            "tokens_per_second": statistics.median(one.generated / one.seconds for one in counted[1:]),
            "tokens_per_pass_and_row": sum(one.generated for one in counted[1:])
            / envs
            / max(1, sum(one.passes for one in counted[1:])),
            **{key: sum(getattr(one, key) for one in counted[1:]) for key in ("passes", "forwarded", "generated")},
        }
    ratios = [
        (drafted.generated / drafted.seconds) / (plain.generated / plain.seconds)
        for plain, drafted in zip(measured["plain"][1:], measured["drafts"][1:], strict=True)
    ]
    return {**result, "drafts_over_plain": statistics.median(ratios), "drafts_over_plain_by_round": ratios}


def both(make: Callable[[], Agent]) -> dict[str, Agent]:
    """Two agents that sample the same replies, one without drafts."""
    agents = {"plain": make(), "drafts": make()}
    plain = agents["plain"].policy
    plain.generation = replace(plain.generation, max_draft_tokens=0)
    for agent in agents.values():
        agent.eval(greedy=False)
        agent.policy.rng.manual_seed(0)
    return agents


def main() -> None:
    """Measure all workloads."""
    parser = parser_of(__doc__)
    parser.add_argument("--tool-calls", type=Path, help="folder of a trained agent of examples/address_book.py")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()

    def untrained(kind: type[Agent], tokens: int) -> Callable[[], Agent]:
        return lambda: kind(*load_model_and_tokenizer("smollm2-135m", "cpu", args.dtype), {"max_new_tokens": tokens})

    result: dict[str, Any] = {}

    def run(name: str, make: Callable[[], Agent], make_env: Callable[[], gym.Env], envs: int, episodes: int) -> None:
        agents = both(make)
        result["dtype"] = str(agents["plain"].model.pretrained_model.dtype).removeprefix("torch.")
        result[name] = compare(agents, make_env, envs, episodes, args.rounds)
        print(name, {key: value for key, value in result[name].items() if "over" in key}, flush=True)

    def blackjack() -> gym.Env:
        return gym.make("Blackjack-v1")

    run("story", untrained(Storyteller, STORY_TOKENS), Questions, 1, 3)
    run("script", untrained(ScriptedPlayer, SCRIPT_TOKENS), blackjack, 1, 4)
    run("script, 4 environments", untrained(ScriptedPlayer, SCRIPT_TOKENS), blackjack, 4, 1)
    if args.tool_calls:
        for envs in (1, 8):
            run(f"tool calls, {envs} environments", lambda: Clerk.load(args.tool_calls), AddressBook, envs, 8 // envs)
    save(f"drafts-{result['dtype']}", result)


if __name__ == "__main__":
    main()
