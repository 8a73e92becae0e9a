"""Search an example's options without an account: the same file as `wandb sweep` takes, searched by Optuna.

python scripts/sweep.py                              scripts/sweep.yaml, 20 trials
python scripts/sweep.py my-sweep.yaml --trials 50    go on with --folder as it was to add trials

Needs pip install 'llamagym[sweep]'. One trial is one run of the program, with a folder of its own; its score is the
metric's last value in that run's metrics.jsonl. Trials are kept in `sweep.log`, so that the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llamagym import ConfigError, LlamaGymError
from llamagym.errors import did_you_mean, needs

if TYPE_CHECKING:
    import optuna

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("bayes", "random")
# Options of the service alone.
_ONLINE = ("track",)


def suggest(trial: optuna.Trial, name: str, space: dict[str, Any]) -> Any:
    """A value of one parameter, in the words of a W&B sweep.

    Raises:
        ConfigError: The parameter's distribution is not supported.
    """
    if "value" in space:
        return space["value"]
    if "values" in space:
        return trial.suggest_categorical(name, space["values"])
    whole = isinstance(space["min"], int) and isinstance(space["max"], int)
    kind = space.get("distribution", "int_uniform" if whole else "uniform")
    if kind == "int_uniform":
        return trial.suggest_int(name, space["min"], space["max"])
    if kind not in ("uniform", "log_uniform_values"):
        known = ("int_uniform", "log_uniform_values", "uniform")
        raise ConfigError(f"parameter {name}: distribution {kind!r} is not known. {did_you_mean(kind, known)}")
    return trial.suggest_float(name, space["min"], space["max"], log=kind == "log_uniform_values")


def run(program: str, options: dict[str, Any], run_dir: Path, metric: str) -> float:
    """One run's score; what it prints goes to a text file beside its folder, which a run wants to itself.

    Raises:
        ConfigError: It ended without the metric, or its folder or text file exists.
    """
    printed = run_dir.with_suffix(".txt")
    for path in (run_dir, printed):
        if path.exists():
            raise ConfigError(f"{str(path)!r} exists and would be overwritten. Pass another --folder.")
    run_dir.mkdir(parents=True)
    given = [f"--{name}={value}" for name, value in options.items()]
    with printed.open("x") as output:
        command = [sys.executable, program, *given, f"--run-dir={run_dir}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=output, stderr=subprocess.STDOUT)
    updates = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = [update[metric] for update in updates if metric in update]
    if not scores:
        names = sorted({name for update in updates for name in update})
        raise ConfigError(f"{run_dir}/metrics.jsonl has no {metric!r}. {did_you_mean(metric, names)}")
    return float(scores[-1])


def _require_journal(path: Path) -> None:
    """Rejects a file that is not the journal of a search.

    Raises:
        ConfigError: It is such a file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            entry = json.loads(file.readline() or "{}")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is not the journal of a sweep: {error}. Pass another --folder.") from error
    if not isinstance(entry, dict) or (entry and "op_code" not in entry):
        raise ConfigError(f"{str(path)!r} is not the journal of a sweep. Pass another --folder.")


def search(sweep: dict[str, Any], folder: Path, trials: int, seed: int) -> optuna.Study:
    """Run trials until the study has so many; one that fails is reported and passed over."""
    with needs("sweep", "A sweep"):
        import optuna
    method = sweep.get("method", "bayes")
    if method not in METHODS:
        raise ConfigError(f"method {method!r} is not known. {did_you_mean(method, METHODS)}")
    folder.mkdir(parents=True, exist_ok=True)
    _require_journal(folder / "sweep.log")
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "sweep.log"))
    samplers = optuna.samplers
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(journal),
        sampler=samplers.TPESampler(seed=seed) if method == "bayes" else samplers.RandomSampler(seed=seed),
        study_name="sweep",
        direction=sweep["metric"]["goal"],
        load_if_exists=True,
    )
    parameters = {name: space for name, space in sweep["parameters"].items() if name not in _ONLINE}

    def objective(trial: optuna.Trial) -> float:
        options = {name: suggest(trial, name, space) for name, space in parameters.items()}
        return run(sweep["program"], options, folder / f"trial-{trial.number}", sweep["metric"]["name"])

    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    study.optimize(objective, max(0, trials - len(done)), catch=(subprocess.CalledProcessError,))
    return study


def ranked(study: optuna.Study, metric: str) -> list[str]:
    """A table of finished trials, the best first."""
    finished = [trial for trial in study.trials if trial.value is not None]
    best_first = sorted(finished, key=lambda trial: trial.value or 0.0, reverse=study.direction.name == "MAXIMIZE")
    names = list(dict.fromkeys(name for trial in best_first for name in trial.params))
    rows = [["trial", metric, *names]]
    for trial in best_first:
        values = (trial.value, *(trial.params.get(name, "") for name in names))
        rows.append([str(trial.number), *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def main() -> None:
    """Search, and print the ranked table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="?", default=ROOT / "scripts/sweep.yaml", help="as W&B takes it")
    parser.add_argument("--trials", type=int, default=20, help="in all")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="where trials are kept")
    parser.add_argument("--seed", type=int, default=0, help="of the search; of a run, say it in the file")
    args = parser.parse_args()
    sweep = yaml.safe_load(args.sweep.read_text())
    study = search(sweep, args.folder.resolve(), args.trials, args.seed)
    print("\n".join(ranked(study, sweep["metric"]["name"])))


if __name__ == "__main__":
    try:
        main()
    except LlamaGymError as error:
        sys.exit(f"{type(error).__name__}: {error}")
