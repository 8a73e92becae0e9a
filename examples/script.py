"""Shared by the examples: command-line options, the agent, and a run that ends with `summary.json` and a report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import llamagym as lg

HELD_OUT_SEED = 1_000_000  # of evaluation episodes; training episodes derive their seeds from --seed
RUN = ("episodes", "minutes", "num_envs", "seed", "run_dir", "resume", "track")
LEARNER = {"batch_size": int, "mini_batch_size": int, "learning_rate": float, "target_kl": float, "entropy_coef": float}


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of all examples; `defaults` sets some, and `eval_episodes` among them adds that option."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m", help="registered name, hub id or local folder")
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    options.add_argument("--load-in-8bit", action="store_true", help="quantized weights; needs a GPU")
    options.add_argument("--algorithm", default="ppo", choices=["ppo", "grpo"])
    options.add_argument("--episodes", type=int, help="stop after this many")
    options.add_argument("--minutes", type=float, help="stop after this time, or at another limit if that comes first")
    options.add_argument("--num-envs", type=int, help="environments that are stepped together")
    for name, kind in LEARNER.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=kind, help="option of PPOConfig or GRPOConfig")
    options.add_argument("--eval-every", type=int, help="updates between two evaluations")
    if "eval_episodes" in defaults:
        options.add_argument("--eval-episodes", type=int, help="held-out episodes per evaluation")
    options.add_argument("--seed", type=int, default=0)
    run_dir = Path("runs", time.strftime(f"{options.prog[:-3]}-%Y%m%d-%H%M%S"))
    options.add_argument("--run-dir", type=Path, default=run_dir, help="default: runs/<example>-<time>")
    options.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    options.add_argument("--track", nargs="+", default=[], help="tensorboard, wandb, mlflow, csv, ...")
    options.set_defaults(**defaults)
    return options


def parse(options: argparse.ArgumentParser, **budget: float) -> argparse.Namespace:
    """Read the command line; the default `budget` (episodes or minutes) holds unless the user sets one."""
    args = options.parse_args()
    if args.resume and not args.run_dir.is_dir():
        options.error("--resume needs --run-dir, the folder of the run to continue")
    if args.episodes is None and args.minutes is None:
        vars(args).update(budget)
    return args


def load(args: argparse.Namespace, kind: type[lg.Agent], context: Any = "turn", **options: Any) -> Any:
    """An agent of a class with the command line's options; `options` are further arguments of its constructor."""
    learner = {name: vars(args)[name] for name in LEARNER if vars(args)[name] is not None}
    options["learner"] = {"ppo": lg.PPOConfig, "grpo": lg.GRPOConfig}[args.algorithm](**learner)
    loaded = lg.load_model_and_tokenizer(args.model, device=args.device, load_in_8bit=args.load_in_8bit)
    print(f"{args.model} is loaded", flush=True)
    return kind(*loaded, context=context, seed=args.seed, **options)


def learn(args: Any, agent: Any, env: Any, score: Any, baselines: Any, first: Any = (), show: Any = None) -> None:
    """Train with the callbacks `first`, score the agent before and after by `score(agent, greedy)`, and report."""
    scores = lg.ScoreCallback(lambda agent: score(agent, False), every=args.eval_every, baselines=baselines)
    print("Baselines: " + ", ".join(f"{value:.3f} {name}" for name, value in baselines.items()), flush=True)
    result = lg.train(agent, env, **{name: vars(args)[name] for name in RUN}, callbacks=[*first, scores])
    if lg.is_main_process():
        print(show(agent) if show else "")
        summarize(args, agent, result, scores, score(agent, True), baselines)


def summarize(args: Any, agent: Any, result: Any, scores: Any, greedy: Any, baselines: dict[str, float]) -> None:
    """Print what was learned, and save it with the agent in the run's folder."""
    returns = {"before": scores.before.mean, "after": scores.after.mean, "greedy": getattr(greedy, "mean", greedy)}
    summary = {f"expected_return_{when}": value for when, value in returns.items()}
    summary |= {f"standard_error_{when}": vars(scores)[when].standard_error for when in ("before", "after")}
    summary |= {"episodes": len(result.returns), "updates": len(result.updates), "turns": result.turns}
    summary |= {"minutes": result.minutes, "dtype": str(agent.policy.model.pretrained_model.dtype)[6:]}
    summary |= {"seed": args.seed, "baselines": baselines, "settings": vars(args)}
    (args.run_dir / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")
    named = {name: f"{value:.3f}" for name, value in (returns | baselines).items()}
    agent.save_pretrained(args.run_dir / "agent", environment=Path(sys.argv[0]).stem, results=named)
    print("Expected return: " + ", ".join(f"{value} {name}" for name, value in named.items()))
    print(f"{len(result.returns):,} episodes in {result.minutes:.1f} minutes. Report: {result.report}")


def evaluation(env: Any, args: argparse.Namespace) -> Any:
    """A score for `learn`: held-out episodes that the agent plays, `--eval-episodes` of them."""
    held_out = {"episodes": args.eval_episodes, "seed": HELD_OUT_SEED, "num_envs": args.num_envs}
    return lambda agent, greedy: lg.evaluate(agent, env, greedy=greedy, **held_out)


def run(main: Any) -> None:
    """Run an example; the library's own errors end it with one line."""
    try:
        main()
    except lg.LlamaGymError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
