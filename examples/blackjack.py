"""Train a language model to play Blackjack, and know exactly how well it plays.

python examples/blackjack.py                     the embedded 135M model, minutes on a laptop
python examples/blackjack.py --free-text         no list of admissible words: the reply is free text
python examples/blackjack.py --sft-warm-start    learns from demonstrations first; with --free-text only the format
accelerate launch --config_file scripts/accelerate/cpu-2.yaml examples/blackjack.py    in two processes
python examples/blackjack.py --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --load-in-8bit --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import script
from blackjack_exact import STATES, State, baseline_returns, expected_return, strategy_table
from gymnasium.vector import AutoresetMode

from llamagym import Agent, demonstrations_path, parse_choice
from llamagym.learners import ranks
from llamagym.models import checkpoints
from llamagym.training.interrupts import EXIT_CODE, Interrupts
from llamagym.training.saved_run import saved_on_error
from llamagym.training.tracking import Progress


class BlackjackAgent(Agent):
    """Sees its sum, the dealer's card and whether an ace is usable; says stick or hit."""

    free_text = False

    def get_system_prompt(self) -> str:
        """The rules, in a line: it is read once for all hands."""
        return "You play blackjack. You see your sum and the dealer's card. Answer with one word: stick or hit."

    def format_observation(self, observation: State) -> str:
        """One short line."""
        player, dealer, usable_ace = observation
        return f"{'soft ' if usable_ace else ''}{player} against {'ace' if dealer == 1 else dealer}"

    def get_action_choices(self, observation: State) -> list[str] | None:
        """The two words, unless the reply is free text."""
        return None if self.free_text else ["stick", "hit"]

    def extract_action(self, response: str) -> int:
        """0 sticks, 1 hits."""
        return parse_choice(response, {"stick": 0, "hit": 1})

    def fallback_action(self, observation: State) -> int:
        """An unreadable reply sticks."""
        return 0


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = script.parser(__doc__, episodes=250_000, num_envs=128, eval_every=1)
    parser.add_argument("--no-calibration", action="store_true", help="leave the model's prior for one word as it is")
    parser.add_argument("--free-text", action="store_true", help="do not restrict replies to stick and hit")
    parser.add_argument("--sft-warm-start", action="store_true", help="learn from demonstrations first")
    parser.add_argument("--max-new-tokens", type=int, default=4, help="longest free-text reply")
    args = parser.parse_args()
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    return args


def hit_probabilities(agent: BlackjackAgent, greedy: bool = False) -> dict[State, float]:
    """How often the agent hits in each state: exact for choices and when greedy, from 20 samples a state otherwise."""
    if not agent.free_text:
        hits = [probability["hit"] for probability in agent.action_probabilities(STATES)]
        return {state: float(hit > 0.5) if greedy else hit for state, hit in zip(STATES, hits, strict=True)}
    samples = 1 if greedy else 20
    agent.eval(greedy)
    actions = []
    for sample in range(samples):
        ids = [("table", sample, state) for state in STATES]
        actions.append(agent.act_batch(STATES, ids))
        agent.discard_episodes(ids)
    agent.train()
    return dict(zip(STATES, np.mean(actions, axis=0).tolist(), strict=True))


def main() -> None:
    """Load, play, learn, and report."""
    args = parse_args()
    run_dir = args.run_dir or Path("runs") / time.strftime("blackjack-%Y%m%d-%H%M%S")
    calibrate = not args.no_calibration
    agent: Any = script.load(args, BlackjackAgent, max_new_tokens=args.max_new_tokens, calibrate_choices=calibrate)
    agent.free_text = args.free_text
    if args.checkpoint_dir and not args.resume:
        checkpoints.require_none(args.checkpoint_dir)
    with ranks.first_goes_first():
        newest = checkpoints.newest(args.checkpoint_dir) if args.resume else None
    if args.sft_warm_start and newest is None:
        print(agent.sft_from_jsonl(demonstrations_path(f"{'format' if args.free_text else 'demo'}_blackjack")))
    before = expected_return(hit_probabilities(agent))

    # Both options must be passed: the registered default is sab=True, another game.
    envs = gym.make_vec(
        "Blackjack-v1",
        num_envs=args.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        natural=False,
        sab=False,
    )
    tracker = script.tracker_for(args, run_dir, agent)
    done = {"finished": 0, "turns": 0, "updates": 0, "minutes": 0.0}
    if newest is not None:
        done = agent.load_checkpoint(newest)
        tracker.rewind(done["tracker"])
    finished, turns, updates = done["finished"], done["turns"], done["updates"]
    started = time.perf_counter() - 60 * done["minutes"]

    def save() -> None:
        counted = {"finished": finished, "turns": turns, "updates": updates, "tracker": tracker.position()}
        path = checkpoints.path_of(args.checkpoint_dir, turns)
        agent.save_checkpoint(path, {**counted, "minutes": (time.perf_counter() - started) / 60})
        if ranks.is_first():
            checkpoints.prune(args.checkpoint_dir, keep=3, written=path)

    # Hands under way are dealt anew when a run is resumed, others than at its start, and others in each process.
    observations, _ = envs.reset(seed=args.seed + turns + ranks.rank() * args.num_envs)
    # Hands that are dealt alike are what GRPO compares.
    dealt = list(zip(*(part.tolist() for part in observations), strict=True))
    with (
        closing(tracker),
        Progress(args.episodes, unit="hand", window=1000) as progress,
        Interrupts(listens=args.checkpoint_dir is not None) as interrupts,
        saved_on_error(save if args.checkpoint_dir else None),
    ):
        stops = is_late = False
        while finished < args.episodes and not stops and not is_late:
            hands = list(zip(*(part.tolist() for part in observations), strict=True))
            actions = agent.act_batch(hands)
            sample = agent.current_episode_messages
            observations, rewards, terminated, truncated, _ = envs.step(np.array(actions))
            agent.assign_rewards(rewards.tolist())
            ended = np.flatnonzero(terminated | truncated)
            stats = agent.terminate_episodes(ended.tolist(), groups=[dealt[table] for table in ended])
            for table in ended:
                dealt[table] = tuple(part[table].item() for part in observations)

            # What several processes must agree on, they tell each other.
            minutes = (time.perf_counter() - started) / 60
            returns, signals, clocks = zip(
                *ranks.gather((rewards[ended].tolist(), interrupts.stops, minutes)), strict=True
            )
            stops, is_late = any(signals), args.minutes is not None and clocks[0] >= args.minutes
            turns += ranks.count() * len(hands)
            finished += sum(map(len, returns))
            progress.advance(list(chain(*returns)), stats)
            if stats:
                updates += 1
                stats["minutes"] = minutes
                if updates % args.eval_every == 0:
                    stats["expected_return"] = expected_return(hit_probabilities(agent, greedy=args.free_text))
                tracker.log(stats, finished)
                if args.checkpoint_dir and updates % args.checkpoint_every == 0:
                    save()
                if updates % 5 == 1:
                    said = " / ".join(f"{message['role']}: {message['content']}" for message in sample[-2:])
                    progress.note(f"update {updates}, {said}")
        if args.checkpoint_dir:
            save()
    minutes = (time.perf_counter() - started) / 60
    if stops:
        sys.exit(EXIT_CODE)
    if not ranks.is_first():
        return
    if not updates:
        print(agent.why_no_update())

    policy = hit_probabilities(agent)
    after, greedy = expected_return(policy), expected_return(hit_probabilities(agent, greedy=True))
    results = {"exact expected return": f"{after:+.4f}", "if greedy": f"{greedy:+.4f}", **baseline_returns()}
    agent.save_pretrained(run_dir / "agent", environment="Blackjack-v1", results=results)
    peak = script.peak_memory_gib()
    summary = {
        "seed": args.seed,
        "model": args.model,
        "dtype": script.dtype_name(agent),
        "episodes": finished,
        "turns": turns,
        "updates": updates,
        "minutes": minutes,
        "turns_per_second": turns / minutes / 60,
        "processes": ranks.count(),
        "peak_memory_gib": peak,
        "expected_return_before": before,
        "expected_return_after": after,
        "expected_return_greedy": greedy,
        "baselines": baseline_returns(),
        "policy_table": {" ".join(map(str, state)): hit for state, hit in policy.items()},
        "settings": script.settings_of(args),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(strategy_table(policy))
    print(f"Exact expected return: {before:+.4f} before, {after:+.4f} after ({greedy:+.4f} if greedy).")
    print("Baselines: " + ", ".join(f"{name} {value:+.4f}" for name, value in baseline_returns().items()) + ".")
    print(f"{finished} hands, {turns} turns, {minutes:.1f} min, {peak:.2f} GiB peak. Results: {run_dir}")


if __name__ == "__main__":
    script.run(main)
