"""What the examples share: their options, and a run from loading a model to `summary.json`.

An example brings an agent, an environment and a way to score what the agent has learnt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np

from llamagym import Agent, Callback, LlamaGymError, Run, evaluate, load_model_and_tokenizer, train
from llamagym.learners import ranks
from llamagym.models import checkpoints
from llamagym.training import EnvSource
from llamagym.training.tracking import MultiTracker, default_tracker

Score = tuple[float, float]
"""Expected return and its standard error; the latter is 0 where the return is computed, not sampled."""
Stats = dict[str, float]
Player = Callable[[Any], int]
"""Says what to do after an observation."""

HELD_OUT_SEED = 1_000_000
"""What held-out episodes are drawn from; training draws its own from --seed."""


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all examples have.

    Args:
        description: What --help shows, the example's docstring.
        defaults: Of the options, by name; `eval_episodes` makes that an option.
    """
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m", help="registry name, hub id or local folder")
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    options.add_argument("--load-in-8bit", action="store_true")
    options.add_argument("--load-in-4bit", action="store_true")
    options.add_argument("--algorithm", default="ppo", choices=["ppo", "grpo"])
    options.add_argument("--episodes", type=int, help="to play")
    options.add_argument("--minutes", type=float, help="stop after so many, if that is sooner")
    options.add_argument("--num-envs", type=int, help="environments acted in at once")
    options.add_argument("--batch-size", type=int, help="turns per update")
    options.add_argument("--mini-batch-size", type=int, help="turns per optimiser step")
    options.add_argument("--learning-rate", type=float)
    options.add_argument("--target-kl", type=float, help="KL by which an update may move the policy")
    options.add_argument("--entropy-coef", type=float)
    options.add_argument("--entropy-decay", type=float, help="of that, from one update to the next")
    options.add_argument("--entropy-floor", type=float, help="entropy that the bonus is raised to keep")
    options.add_argument("--eval-every", type=int, help="updates from one evaluation to the next")
    if "eval_episodes" in defaults:
        options.add_argument("--eval-episodes", type=int, help="held-out episodes of an evaluation")
    options.add_argument(
        "--bare-numbers", action="store_true", help="show observations as the environment numbers them"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--run-dir", type=Path, help="default: runs/<example>-<time>")
    options.add_argument("--checkpoint-dir", type=Path, help="write checkpoints here; none by default")
    options.add_argument("--checkpoint-every", type=int, default=10, help="updates between two checkpoints")
    options.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    options.add_argument("--log-with", nargs="+", default=[], help="csv, tensorboard, trackio, mlflow, wandb, ...")
    options.add_argument("--wandb-project", help="log to Weights & Biases; WANDB_PROJECT does the same")
    options.add_argument("--wandb-mode", choices=["online", "offline", "disabled"], help="WANDB_MODE does the same")
    unknown = set(defaults) - {action.dest for action in options._actions}
    assert not unknown, f"no option takes {unknown}"
    options.set_defaults(**defaults)
    return options


def load(
    args: argparse.Namespace,
    kind: type[Agent],
    context: Literal["turn", "episode"] = "turn",
    max_new_tokens: int | None = None,
    calibrate_choices: bool = True,
) -> Agent:
    """An agent with the options of the command line; what is not given there is the library's default.

    Args:
        args: The command line.
        kind: The agent's class.
        context: Whether it sees the current observation only, or the whole conversation.
        max_new_tokens: Longest reply in free text; None is the library's.
        calibrate_choices: Whether what the model says anyway is taken off its choices' scores.
    """
    model, tokenizer, device = load_model_and_tokenizer(
        args.model,
        device=args.device,
        load_in_8bit=args.load_in_8bit,
        load_in_4bit=args.load_in_4bit,
    )
    named = (
        "batch_size",
        "mini_batch_size",
        "learning_rate",
        "entropy_coef",
        "entropy_decay",
        "entropy_floor",
        "target_kl",
    )
    options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    configs: dict[str, Any] = {f"{args.algorithm}_config_dict": options, "context": context, "seed": args.seed}
    configs["calibrate_choices"] = calibrate_choices
    kind = reading_numbers(kind) if args.bare_numbers else kind
    sampling = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    return kind(model, tokenizer, device, sampling, algorithm=args.algorithm, **configs)


def reading_numbers(kind: type[Agent]) -> type[Agent]:
    """The same agent, but for what it reads: an observation's numbers without words, to see what words are worth."""

    class NumberReader(kind):  # type: ignore[valid-type, misc]
        def format_observation(self, observation: Any) -> str:
            return " ".join(map(str, np.ravel(observation)))

    return NumberReader


def play_held_out(agent: Agent, env: EnvSource, args: argparse.Namespace) -> Callable[[bool], Score]:
    """Scores the agent, greedy or not, by playing `--eval-episodes` of an environment with seeds of its own."""

    def score(greedy: bool) -> Score:
        result = evaluate(agent, env, args.eval_episodes, HELD_OUT_SEED, args.num_envs, greedy)
        return result.mean, result.standard_error

    return score


def random_return(env: Callable[[], gymnasium.Env], episodes: int = 200) -> float:
    """Mean return of actions drawn evenly among those that are possible, in held-out episodes."""
    return evaluate("random", env, episodes, HELD_OUT_SEED).mean


class Scoring(Callback):
    """Adds the score to the statistics of every so many updates."""

    def __init__(self, score: Callable[[bool], Score], every: int) -> None:
        """Score after every `every` updates."""
        self._score, self._every = score, every

    def on_update(self, run: Run, stats: dict[str, float]) -> None:
        """Score if it is time."""
        if len(run.updates) % self._every == 0:
            stats["expected_return"], stats["standard_error"] = self._score(False)


def learn(
    args: argparse.Namespace,
    agent: Agent,
    env: EnvSource,
    score: Callable[[bool], Score],
    baselines: dict[str, float],
    warm_start: Callable[[], Stats] | None = None,
) -> None:
    """Score, train, score again; writes `metrics.jsonl`, `summary.json` and the agent to the run's folder.

    Args:
        args: The command line.
        agent: Who learns.
        env: What to train in.
        score: Of the agent as it is now, greedy or sampling.
        baselines: Expected returns to compare with.
        warm_start: Learns from demonstrations first, and returns the statistics; None is no warm start.
    """
    run_dir = args.run_dir or Path("runs") / time.strftime(f"{Path(sys.argv[0]).stem}-%Y%m%d-%H%M%S")
    warm_stats, (before, before_error) = begin(args, run_dir, agent, score, warm_start)
    with closing(tracker_for(args, run_dir, agent)) as tracker:
        result = train(
            agent,
            env,
            args.episodes,
            args.num_envs,
            args.seed,
            tracker=tracker,
            minutes=args.minutes,
            callbacks=Scoring(score, args.eval_every),
            checkpoint_dir=args.checkpoint_dir,
            checkpoint_every=args.checkpoint_every,
            resume=args.resume,
        )
    if not ranks.is_first():
        return
    after, after_error = score(False)
    greedy, greedy_error = score(True)
    results = {"expected return": f"{after:.3f} ± {after_error:.3f}", "if greedy": f"{greedy:.3f}", **baselines}
    agent.save_pretrained(run_dir / "agent", environment=Path(sys.argv[0]).stem, results=results)
    summary = {
        "seed": args.seed,
        "model": args.model,
        "dtype": dtype_name(agent),
        "episodes": len(result.returns),
        "turns": result.turns,
        "updates": len(result.updates),
        "minutes": result.minutes,
        "processor_minutes": time.process_time() / 60,
        "turns_per_second": result.turns / result.minutes / 60,
        "peak_memory_gib": peak_memory_gib(),
        "warm_start": warm_stats,
        "expected_return_before": before,
        "expected_return_after": after,
        "expected_return_greedy": greedy,
        "standard_error_before": before_error,
        "standard_error_after": after_error,
        "standard_error_greedy": greedy_error,
        "baselines": baselines,
        "settings": settings_of(args),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"Expected return: {before:.3f} before, {after:.3f} ± {after_error:.3f} after ({greedy:.3f} if greedy).")
    print("Baselines: " + ", ".join(f"{name} {value:.3f}" for name, value in baselines.items()) + ".")
    print(f"{len(result.returns)} episodes, {result.turns} turns, {result.minutes:.1f} min. Results: {run_dir}")


def begin(
    args: argparse.Namespace,
    run_dir: Path,
    agent: Agent,
    score: Callable[[bool], Score],
    warm_start: Callable[[], Stats] | None = None,
) -> tuple[Stats | None, Score]:
    """Start warm and score what samples then; a run that goes on has done both, and has them in its folder."""
    path, warm = run_dir / "before.json", run_dir / "warm-start"
    is_trained = args.resume and args.checkpoint_dir and checkpoints.newest(args.checkpoint_dir)
    warm_stats: Stats | None = None
    if args.resume and warm.exists() and not is_trained:
        warm_stats = agent.load_checkpoint(warm)
    if args.resume and path.exists():
        warm_stats, (before, error) = json.loads(path.read_text())
        return warm_stats, (before, error)
    if warm_start and not (is_trained or warm_stats):
        warm_stats = warm_start()
        print("Warm start: " + ", ".join(f"{name} {value:.4g}" for name, value in warm_stats.items()) + ".")
        agent.save_checkpoint(warm, warm_stats)
    measured = score(False)
    if ranks.is_first():
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([warm_stats, measured]) + "\n")
    return warm_stats, measured


def imitate(agent: Agent, env: gymnasium.Env, player: Callable[[gymnasium.Env, int], Player], episodes: int) -> Stats:
    """Learn, once, from episodes of a player who knows more than the agent; of seeds 0, 1, ...

    Args:
        agent: Who learns; its choices are in the order of the environment's actions.
        env: What is played.
        player: Makes the player of an episode, from the environment after `reset` and the episode's seed.
        episodes: How many.
    """
    episodes_shown = []
    for seed in range(episodes):
        (observation, _), play, messages, over = env.reset(seed=seed), player(env, seed), [], False
        while not over:
            action = play(observation)
            messages.append({"role": "user", "content": agent.format_observation(observation)})
            messages.append({"role": "assistant", "content": agent.get_action_choices(observation)[action]})
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        episodes_shown.append(json.dumps({"messages": messages}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shown.jsonl"
        path.write_text("\n".join(episodes_shown), encoding="utf-8")
        return agent.sft_from_jsonl(path, epochs=1)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON holds it."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def tracker_for(args: argparse.Namespace, run_dir: Path, agent: Agent) -> MultiTracker:
    """What the command line says about where statistics go."""
    return default_tracker(
        run_dir, settings_of(args), args.wandb_project, args.wandb_mode, agent=agent, log_with=args.log_with
    )


def dtype_name(agent: Agent) -> str:
    """What the weights are held in; by default it depends on the processor."""
    return str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")


def peak_memory_gib() -> float:
    """Largest resident memory so far."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def run(main: Callable[[], None]) -> None:
    """Run an example; the library's own errors end it with one line."""
    try:
        main()
    except LlamaGymError as error:
        sys.exit(f"{type(error).__name__}: {error}")
