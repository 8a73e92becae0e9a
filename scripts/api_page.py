"""Writes docs/api.md: every public name with an example; signatures, types, defaults and errors come from docstrings.

    python scripts/api_page.py           write the page
    python scripts/api_page.py --check   fail if the page is not up to date

tests/project/test_api.py runs every example.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
# Public names of `llamagym`, each with one line that uses it. The lines are run in their order. `env_id` is the id of
# an environment, `BlackjackAgent` a subclass of `Agent` for it, `base_model` a causal language model, `folder` a new
# folder.
EXAMPLES: dict[str, dict[str, str]] = {
    "Models": {
        "load_model_and_tokenizer": 'model, tokenizer, device = lg.load_model_and_tokenizer("smollm2-135m")',
        "AutoModelForCausalLMWithValueHead": "model = lg.AutoModelForCausalLMWithValueHead.from_pretrained(base_model)",
    },
    "Agent": {
        "Agent": 'agent = BlackjackAgent(model, tokenizer, context="turn", learner=lg.PPOConfig(batch_size=8))',
        "GenerationConfig": "BlackjackAgent(model, tokenizer, None, lg.GenerationConfig(max_new_tokens=8))",
        "Report": "report: lg.Report = agent.preflight(); print(report)",
        "Check": "failed: list[lg.Check] = [check for check in report.checks if not check.passed]",
        "name_actions": 'words = lg.name_actions(gym.spaces.Discrete(2), ["stick", "hit"])',
        "parse_action": 'lg.parse_action("7", gym.spaces.Discrete(10))',
        "parse_choice": 'lg.parse_choice("I hit.", {"stick": 0, "hit": 1})',
        "find_json": "lg.find_json('I bid {\"price\": 3}')",
        "demonstrations_path": 'path = lg.demonstrations_path("format_blackjack")',
    },
    "Samplers": {
        "VLLMSampler": 'sampler = lg.VLLMSampler("http://127.0.0.1:8000")',
        "LlamaCppSampler": (
            'BlackjackAgent(*lg.load_model_and_tokenizer("smollm2-135m")).save_gguf("served"); '
            'lg.LlamaCppSampler("http://127.0.0.1:8080", "served")'
        ),
        "Sampler": "sampler: lg.Sampler | None = agent.policy.sampler",
        "SampledText": 'text = lg.SampledText(ids=(7, 2), logprobs=(-0.5, -0.1), finish_reason="eos")',
    },
    "Serving": {
        "ChatAgent": "chat_agent = lg.ChatAgent(model, tokenizer)",
        "serve": "with lg.serve(chat_agent) as url: print(url)",
    },
    "Learning algorithms": {
        "PPOConfig": "BlackjackAgent(model, tokenizer, learner=lg.PPOConfig(learning_rate=3e-4))",
        "GRPOConfig": "BlackjackAgent(model, tokenizer, learner=lg.GRPOConfig(group_size=4))",
        "ReinforceConfig": "BlackjackAgent(model, tokenizer, learner=lg.ReinforceConfig(gamma=1.0))",
        "LearnerConfig": "config: lg.LearnerConfig = agent.learner.config",
        "ReplayConfig": "BlackjackAgent(model, tokenizer, replay_config_dict=lg.ReplayConfig(steps=1))",
    },
    "Training": {
        "train": "result = lg.train(agent, env_id, episodes=4, run_dir=folder)",
        "TrainingResult": "print(result.returns, result.success_rate)",
        "Run": "def on_step(run: lg.Run) -> bool: return run.turns < 1000",
        "Callback": "class Stop(lg.Callback): on_step = staticmethod(on_step)",
        "EvalCallback": "lg.train(agent, env_id, episodes=4, callbacks=lg.EvalCallback(env_id, episodes=2))",
        "ScoreCallback": "scores = lg.ScoreCallback(lambda agent: 0.5, every=1)",
        "Score": "score: lg.Score | None = scores.after",
        "StopOnReturn": "lg.train(agent, env_id, episodes=4, callbacks=lg.StopOnReturn(0.9))",
        "PlayedEpisode": "def judge(episode: lg.PlayedEpisode) -> float: return -0.01 * episode.length",
        "Turn": "def reply_ids(turn: lg.Turn) -> tuple[int, ...]: return turn.reply.ids",
        "Prompt": "def prompt_ids(prompt: lg.Prompt) -> tuple[int, ...]: return prompt.ids",
        "Reply": "def logprob(reply: lg.Reply) -> float: return sum(reply.logprobs)",
        "Progress": "with lg.Progress(100) as progress: progress.advance([1.0], {})",
    },
    "Evaluation": {
        "evaluate": "measured = lg.evaluate(agent, env_id, episodes=4, seed=0)",
        "EvaluationResult": "print(measured.mean, measured.interval)",
        "side_by_side": 'print(lg.side_by_side({"agent": measured}))',
    },
    "Tracking": {
        "default_tracker": 'tracker = lg.default_tracker("runs/mine", {"seed": 0}); tracker.close()',
        "Tracker": "def log_to(tracker: lg.Tracker) -> None: tracker.log({'loss': 0.5}, step=1)",
        "write_report": "lg.write_report([folder], folder / 'report.html')",
    },
    "Several processes": {
        "is_main_process": "if lg.is_main_process(): print('the first process')",
        "main_process_first": "with lg.main_process_first(): print('the first process downloads, the others wait')",
        "gather_objects": "every_seed = lg.gather_objects(0)",
    },
    "TRL 0.11's trainer": {
        "PPOTrainer": "trainer = lg.PPOTrainer(lg.PPOConfig(batch_size=2), model, None, tokenizer)",
    },
}
MODULES = {
    "Environments": [f"envs.{name}" for name in ("guess_number", "mastermind", "address_book", "babyai", "textworld")]
    + ["envs.textarena", "envs.openenv"],
    "Mathematics": ["learners.losses", "learners.lstd", "policy.choices"],
    "Errors": ["errors"],
}


def page() -> str:
    """Returns the page in Markdown."""
    lines = [
        "# API",
        "",
        "Written by `scripts/api_page.py` from the docstrings. In the examples, `lg` is `llamagym`, `gym` is "
        "`gymnasium` and `BlackjackAgent` a subclass of `Agent`.",
    ]
    for title, examples in EXAMPLES.items():
        lines += ["", f"## {title}"]
        for name, code in examples.items():
            lines += ["", f"::: llamagym.{name}"]
            if name == "Agent":
                lines += ["    options:", "      inherited_members: true", '      filters: ["!^_"]']
            lines += ["", "```python", code, "```"]
    for title, modules in MODULES.items():
        lines += ["", f"## {title}"]
        for module in modules:
            lines += ["", f"::: llamagym.{module}"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/api.md is not up to date. Run python scripts/api_page.py.")


if __name__ == "__main__":
    main()
