"""Train a language model to play Blackjack, and compute exactly how well it plays.

python examples/blackjack.py                       2.5 minutes with the embedded 135M model
python examples/blackjack.py --episodes 250000     the long run, close to the optimum
python examples/blackjack.py --free-text           replies are free text instead of one of two words
python examples/blackjack.py --sft-warm-start      learns from demonstrations first; with --free-text only the format
"""

import gymnasium as gym
import numpy as np
import script
from blackjack_exact import STATES, State, baseline_returns, expected_return, strategy_table
from imitation import WarmStart

from llamagym import Agent, demonstrations_path, parse_choice


class BlackjackAgent(Agent):
    """Sees its sum, the dealer's card and whether an ace is usable; answers stick or hit."""

    free_text = False

    def get_system_prompt(self) -> str:
        return "You play blackjack. You see your sum and the dealer's card. Answer with one word: stick or hit."

    def format_observation(self, observation: State) -> str:
        player, dealer, usable_ace = observation
        return f"{'soft ' if usable_ace else ''}{player} against {'ace' if dealer == 1 else dealer}"

    def get_action_choices(self, observation: State) -> list[str] | None:
        return None if self.free_text else ["stick", "hit"]

    def extract_action(self, response: str) -> int:
        return parse_choice(response, {"stick": 0, "hit": 1})

    def fallback_action(self, observation: State) -> int:
        return 0  # stick if a reply in free text names no action

    def states(self) -> dict[tuple[str, int, int], State]:  # the report shows the policy in them
        return {("soft" if ace else "hard", total, card): (total, card, ace) for total, card, ace in sorted(STATES)}


def hit_probabilities(agent: BlackjackAgent, greedy: bool = False) -> dict[State, float]:
    """Probability of hitting in each state: exact for choices, estimated from 20 samples for free text."""
    if not agent.free_text:
        hits = np.array([probability["hit"] for probability in agent.action_probabilities(STATES)])
        return dict(zip(STATES, ((hits > 0.5) * 1.0 if greedy else hits).tolist(), strict=True))
    agent.eval(greedy)
    episode_ids = [[(sample, state) for state in STATES] for sample in range(1 if greedy else 20)]
    actions = [agent.act_batch(STATES, ids) for ids in episode_ids]
    agent.terminate_episodes([table for ids in episode_ids for table in ids], train=False)
    agent.train()
    return dict(zip(STATES, np.mean(actions, axis=0).tolist(), strict=True))


def exact_return(agent: BlackjackAgent, greedy: bool) -> float:
    """Expected return of one hand, without the noise of playing hands."""
    return expected_return(hit_probabilities(agent, greedy))


def main() -> None:
    """Load, train, and report."""
    options = script.parser(__doc__, num_envs=128, eval_every=1)
    options.add_argument("--free-text", action="store_true", help="do not restrict replies to stick and hit")
    options.add_argument("--sft-warm-start", action="store_true", help="learn from demonstrations first")
    args = script.parse(options, minutes=2.5)
    agent = script.load(args, BlackjackAgent, generate_config_dict={"max_new_tokens": 4})
    agent.free_text = args.free_text
    demonstrations = demonstrations_path("format_blackjack" if args.free_text else "demo_blackjack")
    warm_start = [WarmStart(lambda: agent.sft_from_jsonl(demonstrations))] if args.sft_warm_start else []
    # The usual rules; the registered default, sab=True, is another game.
    env = gym.make("Blackjack-v1", natural=False, sab=False)
    score = (exact_return, baseline_returns())
    script.learn(args, agent, env, *score, warm_start, lambda agent: strategy_table(hit_probabilities(agent)))


if __name__ == "__main__":
    script.run(main)
