"""The report of runs: one page that a browser shows without a network and without errors."""

from __future__ import annotations

import html
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from llamagym import ConfigError, train
from llamagym.__main__ import main
from llamagym.training.report import write_report
from llamagym.training.tracking import default_tracker
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
HOSTILE = 'says </script><script>alert("x")</script> <!-- & </p>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs, one with text that would break a page without escaping."""

    class Hostile(ChoiceAgent):
        def format_observation(self, observation):
            return f"{HOSTILE} {observation}"

    folders = []
    for name, kind in (("first", Hostile), ("second", ChoiceAgent)):
        folders.append(tmp_path_factory.mktemp("runs") / name)
        agent = make_agent(kind, context="turn", ppo={"batch_size": 24})
        tracker = default_tracker(folders[-1], {"seed": 0, "note": name}, agent=agent)
        train(agent, CountdownEnv, episodes=24, num_envs=4, seed=0, tracker=tracker)
        # An alarm's statistics, so that there is one to show.
        tracker.log({"approx_kl": 0.3, "updates": 99}, 25)
        tracker.close()
    return folders


class LakeAgent(ChoiceAgent):
    choices = ("left", "down", "right", "up")

    def extract_action(self, response: str) -> int:
        return self.choices.index(response)

    def states(self) -> dict[tuple[str, str], int]:
        return {(f"row {number // 4}", f"column {number % 4}"): number for number in range(16)}


@pytest.fixture(scope="module")
def lakes(tmp_path_factory):
    """Two runs that differ in their seed, of an agent that lists its states, in an environment that renders text."""
    folders, results = [], []
    for seed in (0, 1):
        folders.append(tmp_path_factory.mktemp("lakes") / f"lake-{seed}")
        agent = make_agent(LakeAgent, context="turn", ppo={"batch_size": 32, "ppo_epochs": 2})
        env = gym.make("FrozenLake-v1", is_slippery=False)
        results.append(train(agent, env, turns=150, num_envs=8, seed=seed, run_dir=folders[-1], eval_episodes=20))
    return folders, results


def dom(page: Path, *options: str, width: int = 390) -> tuple[str, str]:
    """The DOM that a browser makes of a page, and the browser's log."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--enable-logging=stderr", f"--window-size={width},900", "--dump-dom", *options, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout, result.stderr


def answer(page: Path, script: str, *options: str) -> Any:
    """Runs a script at the end of a page; returns its value, which may be awaited."""
    copy = page.with_name(f"{page.stem}-asked.html")
    ask = f"(async () => {{ {script} }})().then(given => {{ document.title = JSON.stringify(given); }});"
    copy.write_text(page.read_text().replace("</body>", f"<script>{ask}</script></body>"))
    shown, said = dom(copy, "--virtual-time-budget=30000", *options)
    assert "CONSOLE" not in said, said
    return json.loads(html.unescape(re.findall(r"<title>(.*?)</title>", shown, re.DOTALL)[0]))


@pytest.mark.long
@needs_browser
def test_a_browser_shows_curves_alarms_and_episodes_without_an_error(runs, tmp_path):
    shown, said = dom(write_report(runs, tmp_path / "report.html"))
    assert "CONSOLE" not in said
    # Nothing in these runs is invalid: that curve would be constant, and is left out.
    assert shown.count("<figure") == 5
    assert "<figcaption>Entropy" in shown
    assert "<figcaption>Replies without" not in shown
    assert shown.count('class="curve') == 2 * 6
    assert shown.count('class="card alarm"') == 2
    assert "approx_kl jumped to 0.300" in shown
    told = [json.loads(line) for run in runs for line in (run / "transcripts.jsonl").read_text().splitlines()]
    assert f"{len(told)} of {len(told)} episodes" in shown
    # The first episode is open, and shows the observation as text.
    assert shown.count('class="turn"') == 3
    assert "says &lt;/script&gt;&lt;script&gt;alert" in shown
    assert shown.count('class="bar') == 9
    assert shown.count("<script") == 2


@pytest.mark.long
@needs_browser
def test_the_first_row_shows_what_the_terminal_printed(lakes, tmp_path):
    folders, results = lakes
    page = write_report(folders[:1], tmp_path / "report.html")
    tiles = answer(page, 'return [...document.querySelectorAll("#scores .tile")].map(tile => tile.innerText);')
    printed = str(results[0]).splitlines()
    for tile, (name, score), line in zip(tiles, results[0].scores.items(), printed, strict=False):
        mean, shown_name, basis = tile.split("\n")
        assert (shown_name, mean) == (name, f"{score.mean:.3f}")
        assert line.split() == f"{name} {mean} (95% interval {basis})".split()


@pytest.mark.long
@needs_browser
def test_seeds_share_a_curve_with_a_band_and_the_axis_can_be_chosen(lakes, tmp_path):
    page = write_report(lakes[0], tmp_path / "report.html")
    script = """
        const count = name => document.querySelectorAll("figure:first-of-type " + name).length;
        const found = [count(".curve"), count(".band")];
        const label = () => document.querySelector("figure svg").getAttribute("aria-label");
        const axes = [...document.getElementById("axis").options].map(option => option.value);
        const labels = [];
        for (const axis of axes) {
          document.getElementById("axis").value = axis;
          document.getElementById("axis").dispatchEvent(new Event("input"));
          labels.push(label());
        }
        document.getElementById("means").click();
        return [found, axes, labels, count(".curve"), document.getElementById("scores").innerText];
    """
    (curves, bands), axes, labels, separate, scores = answer(page, script)
    assert (curves, bands, separate) == (1, 1, 2)
    assert axes == ["updates", "step", "minutes"]
    assert [re.search(r", by (\w+): lake-0 and 1 more", label)[1] for label in labels] == [
        "update",
        "episodes",
        "minutes",
    ]
    assert all(name in scores for name in ("lake-0", "lake-1", "before", "after", "random"))


@pytest.mark.long
@needs_browser
def test_the_policy_and_the_environments_rendering_are_shown(lakes, tmp_path):
    folders, _ = lakes
    page = write_report(folders[:1], tmp_path / "report.html")
    script = """
        const cells = () => [...document.querySelectorAll("td.cell")].map(cell => cell.innerText);
        const after = cells();
        document.getElementById("policy").value = "0 before";
        document.getElementById("policy").dispatchEvent(new Event("input"));
        const frame = document.querySelector("pre.frame");
        return [after, cells(), frame.innerText, frame.querySelector("mark").innerText];
    """
    after, before, frame, marked = answer(page, script)
    pictures = json.loads((folders[0] / "policy.json").read_text())
    for shown, when in ((after, "after"), (before, "before")):
        best = [max(cell["choices"].items(), key=lambda choice: choice[1]) for cell in pictures[when]]
        assert shown == [f"{choice} {share:.0%}" for choice, share in best]
    assert frame.split() == ["SFFF", "FHFH", "FFFH", "HFFG"]
    assert marked == "S"


@pytest.mark.long
@needs_browser
def test_charts_are_enlarged_and_alarms_lead_to_episodes_of_their_update(runs, tmp_path):
    page = write_report(runs[:1], tmp_path / "report.html")
    script = """
        const button = document.querySelector("figure button");
        button.click();
        const dialog = document.querySelector("dialog");
        const large = [dialog.open, dialog.querySelector("svg").getAttribute("viewBox")];
        dialog.querySelector("button").click();
        await new Promise(done => setTimeout(done, 50));
        const closed = [document.querySelectorAll("dialog").length, document.activeElement === button];
        document.querySelector(".alarm a").click();
        const near = [document.getElementById("update").value, document.getElementById("count").innerText];
        const type = (id, text) => {
          document.getElementById(id).value = text;
          document.getElementById(id).dispatchEvent(new Event("input"));
        };
        type("update", "");
        type("text", "OBSERVATION 3 that nobody saw");
        const none = document.getElementById("count").innerText;
        type("text", "SAYS <\\/SCRIPT>");
        return [large, closed, near, none, document.getElementById("count").innerText];
    """
    large, closed, near, none, found = answer(page, script)
    told = [json.loads(line) for line in (runs[0] / "transcripts.jsonl").read_text().splitlines()]
    latest = max(each["update"] for each in told)
    assert large == [True, "0 0 960 480"]
    assert closed == [0, True]
    assert near == ["99", f"{sum(each['update'] == latest for each in told)} of {len(told)} episodes"]
    assert none == f"0 of {len(told)} episodes"
    assert found == f"{len(told)} of {len(told)} episodes"


@pytest.mark.long
@needs_browser
@pytest.mark.skipif(importlib.util.find_spec("axe_core_python") is None, reason="axe is not installed")
@pytest.mark.parametrize("options", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_axe_finds_no_barrier(runs, lakes, tmp_path, options):
    import axe_core_python

    axe = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    damaged_run(tmp_path / "damaged")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    for folders in (lakes[0], lakes[0][:1], runs, [tmp_path / "damaged"], [tmp_path / "empty"]):
        page = write_report(folders, tmp_path / "report.html")
        found = answer(
            page, f"{axe}; return (await axe.run()).violations.map(each => [each.id, each.nodes[0].html]);", *options
        )
        assert found == []


def test_settings_that_have_their_default_are_marked(lakes, tmp_path):
    (run,) = data_of(write_report(lakes[0][:1], tmp_path / "report.html"))["runs"]
    assert run["settings"]["learner"] == "PPOConfig"
    assert {"entropy_coef", "lam"} <= set(run["defaults"])
    assert not {"batch_size", "ppo_epochs", "seed", "turns"} & set(run["defaults"])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("scores.json", '{"before": {"mean": 1}, "after": 3, "random": {"mean": "x"}}'),
        ("policy.json", '{"before": 1, "after": [1, {}, {"choices": {}, "panel": "", "row": "", "column": ""}]}'),
        ("policy.json", '[{"before": []}]'),
        ("played.jsonl", '{"turns": [{"frame": 1}]}\n{'),
    ],
)
def test_damaged_pictures_are_left_out(tmp_path, file, content):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    (tmp_path / file).write_text(content)
    (run,) = data_of(write_report([tmp_path], tmp_path / "report.html"))["runs"]
    assert (run["scores"], run["policy"], run["played"]) == ([], {}, [])


def test_images_are_shown_if_they_are_base64(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    frames = [{"png": "aGk="}, {"png": '"><script>'}, {"png": 3}, {"text": "\x1b[41mS\x1b[0m"}, {"png": "a" * 10**6}]
    told = [{**TOLD, "turns": [{**TURN, "frame": frame}]} for frame in frames]
    (tmp_path / "played.jsonl").write_text("\n".join(map(json.dumps, told)))
    (run,) = data_of(write_report([tmp_path], tmp_path / "report.html"))["runs"]
    assert [each["turns"][0]["frame"] for each in run["played"]] == [frames[0], {}, {}, frames[3], {}]


@pytest.mark.long
@needs_browser
def test_a_run_without_an_update_is_shown(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    shown, said = dom(write_report([tmp_path], tmp_path / "report.html"))
    assert "CONSOLE" not in said
    assert "No update has run yet." in shown


def test_a_watched_report_is_written_again_and_loads_itself_again(lakes, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    seen = []

    def sleep(seconds: float) -> None:
        seen.append((folder / "report.html").read_text())
        if len(seen) == 3:
            raise KeyboardInterrupt
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"entropy": 1.0}\n')

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["llamagym", "report", str(folder), "--watch"])
    with pytest.raises(SystemExit):
        main()
    assert [page.count('http-equiv="refresh"') for page in seen] == [1, 1, 1]
    assert [page.count('"entropy":1.0') for page in seen] == [0, 1, 2]
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert "Ctrl-C ends it" in capsys.readouterr().out


def test_the_page_links_to_no_other_address(runs, tmp_path):
    page = write_report(runs[:1], tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_rejects_runs_that_cannot_be_reported(tmp_path):
    with pytest.raises(ConfigError, match="holds no metrics"):
        write_report([tmp_path], tmp_path / "report.html")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("nonsense\n[1]\n")
    with pytest.raises(ConfigError, match="has no line that is a JSON object"):
        write_report([tmp_path], tmp_path / "report.html")
    # A run that was killed while it wrote its last line.
    metrics.write_text('{"step": 1, "entropy": 1.0}\n{"step": 2, "ent')
    assert write_report([tmp_path], tmp_path / "report.html").exists()


def test_the_report_command_writes_the_page_or_explains_the_error(runs, tmp_path, monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamagym", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    assert call("report", str(runs[0])) == (0, f"{runs[0] / 'report.html'}\n", "")
    assert (runs[0] / "report.html").exists()
    code, _, complaint = call("report", str(tmp_path))
    assert code == 1
    assert len(complaint.splitlines()) == 1
    assert call("reprot")[0] == 2
    assert "smollm2-135m" in call("models")[1]


# Damaged and hostile files


def data_of(page: Path) -> Any:
    """Returns the data in a page, read by a strict parser."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0], parse_constant=refuse)


TURN = {"turn": 1, "read": "a", "reply": "b", "choices": [["b", 0.5]], "reward": 1.0, "penalty": 0.0, "valid": True,
        "value": 0.0, "advantage": 0.0}  # fmt: skip
TOLD = {"step": 1, "update": 1, "system": "s", "return": 1.0, "length": 1, "truncated": False, "turns": [TURN]}
JUNK = [None, True, "x", [], {}, float("nan"), float("-inf"), 10**400, 1e308, -1, "<b>", "\ud800", [[]], "x" * 10**6]


def damaged_run(folder: Path, count: int = 300) -> Path:
    """A run of which most lines are damaged in some way."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = ["{}", "[1]", "null", "3", "{", "[" * 50_000, '{"entropy": NaN}', '{"return_mean": 1e20, "episodes": -3}']
    metrics += ['{"return_mean": 100000000000000016384, "entropy": 1e999, "act_s": "5", "updates": ' + "9" * 5000 + "}"]
    names = ["return_mean", "return_std", "episodes", "turns", "entropy", "approx_kl", "act_s", "learn_s", "updates"]
    for _ in range(count):
        metrics.append(json.dumps({name: rng.choice([*JUNK, 1.0, 2.5, 3]) for name in rng.sample(names, 5)}))
    told = [json.dumps(TOLD), *metrics[:8]]
    for _ in range(count):
        line = json.loads(json.dumps(TOLD))
        part = rng.choice([line, line["turns"][0]])
        part[rng.choice(list(part))] = rng.choice(JUNK)
        told.append(json.dumps(line))
    (folder / "metrics.jsonl").write_bytes("\n".join(metrics).encode() + b'\n\xff\xfe{"entropy": 1.0}\n{"entr')
    (folder / "transcripts.jsonl").write_bytes("\n".join(told).encode() + b"\n\x80\n")
    settings = {f"name {number} <b>": value for number, value in enumerate(JUNK)}
    settings |= {"model": {"a": 1}, "seed": float("nan"), "dtype": ["x"], "__proto__": {"x": 1}, "\ud800": "\ud800"}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    page = write_report([damaged_run(tmp_path / "run")], tmp_path / "report.html")
    (run,) = data_of(page)["runs"]
    assert run["damaged"] > 10
    assert len(run["rows"]) > 100
    assert all(isinstance(value, (int, float)) for row in run["rows"] for value in row.values())
    assert len(run["transcripts"]) > 10
    assert all(isinstance(value, str) for value in run["settings"].values())
    assert run["settings"]["seed"] == "nan"
    assert page.stat().st_size < 3_000_000


@pytest.mark.parametrize("settings", ["[]", "null", "{", "[" * 50_000, "\xff", "3"])
def test_damaged_settings_do_not_prevent_a_report(tmp_path, settings):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    (tmp_path / "config.json").write_text(settings, encoding="latin-1")
    (run,) = data_of(write_report([tmp_path], tmp_path / "report.html"))["runs"]
    assert run["settings"] == {"config.json": "damaged"}


@pytest.mark.parametrize(
    "name", ["__DATA__", "__TITLE__", "</title><script>alert(1)</script>", "a&b", "\udcff", "x" * 200]
)
def test_run_names_are_escaped(tmp_path, name):
    run = tmp_path / name.replace("/", "\N{FRACTION SLASH}")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    page = write_report([run, run], tmp_path / "report.html")
    assert len(data_of(page)["runs"]) == 2
    text = page.read_text()
    assert text.count("<script") == 2
    assert text.count("<title>") == 1


def test_linked_files_are_not_shown(tmp_path):
    (tmp_path / "secret").write_text('{"token": 12345}\n')
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "transcripts.jsonl", "config.json"):
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("../secret")
        with pytest.raises(ConfigError, match=f"'{name}', which lies outside"):
            write_report([run], tmp_path / "report.html")
        shutil.rmtree(run)


def test_a_report_replaces_only_reports(runs, tmp_path):
    page = write_report(runs[:1], tmp_path / "report.html")
    write_report(runs[:1], page)
    page.write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match="exists and is not a report of llamagym"):
        write_report(runs[:1], page)
    assert page.read_text() == "<html>mine</html>"
    # Other programs embed data under the same name.
    page.write_text('<html><script type="application/json" id="data">{"mine": 1}</script></html>')
    with pytest.raises(ConfigError, match="exists and is not a report of llamagym"):
        write_report(runs[:1], page)
    assert "mine" in page.read_text()


@pytest.mark.parametrize("value", [1e200, -1e200, 1e308])
def test_statistics_whose_squares_overflow_are_reported(tmp_path, value):
    names = ("invalid_rate", "explained_variance", "return_mean", "value_loss")
    rows = [{"updates": number, **dict.fromkeys(names, value * (number % 3))} for number in range(30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert write_report([tmp_path], tmp_path / "report.html").is_file()


@pytest.mark.long
def test_a_page_of_huge_files_stays_small(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({f"n{number}": 1.0 for number in range(100_000)}) + "\n")
    turn = {"turn": 1, "read": "a" * 3000, "reply": "b", "choices": [["c" * 3000, 0.5]] * 200, "valid": True}
    episode = {"update": 1, "system": "s", "return": 1.0, "length": 1, "truncated": False, "turns": [turn] * 300}
    (tmp_path / "transcripts.jsonl").write_text((json.dumps(episode) + "\n") * 2)
    page = write_report([tmp_path], tmp_path / "report.html")
    assert page.stat().st_size < 25_000_000
    turn["choices"] = [["c" * 3000, 0.5]] * 20
    (tmp_path / "transcripts.jsonl").write_text((json.dumps(episode) + "\n") * 30)
    page = write_report([tmp_path], tmp_path / "report.html")
    assert page.stat().st_size < 25_000_000
    assert 1 <= len(data_of(page)["runs"][0]["transcripts"]) < 30


@pytest.mark.parametrize("name", ["metrics.jsonl", "transcripts.jsonl"])
def test_unreadable_files_are_named(runs, tmp_path, monkeypatch, name):
    usual = Path.open

    def closed(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(ConfigError, match=rf"cannot be read: .*Permission denied.*{name}"):
        write_report(runs[:1], tmp_path / "report.html")


@pytest.mark.long
@needs_browser
def test_a_browser_shows_a_report_of_damaged_metrics(tmp_path):
    folders = [damaged_run(tmp_path / name) for name in ("__DATA__", "<img src=x onerror=alert(1)>")]
    # More values than a function call takes arguments.
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write("\n" + '{"return_mean": 1.0, "entropy": 0.5}\n' * 150_000)
    for shown_folders in (folders, folders[:1]):
        shown, said = dom(write_report(shown_folders, tmp_path / "report.html"))
        assert "CONSOLE" not in said
        assert "damaged lines" in shown
        assert shown.count("<figure") == 4
        assert 'class="turn"' in shown
        assert "<h2>Settings" in shown
        assert shown.count("<script") == 2
        assert "<img" not in shown


@pytest.mark.parametrize("mean", ["NaN", "1e999", "1" * 400, '"x"'])
def test_scores_that_are_not_finite_are_left_out(tmp_path, mean):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    record = '{"mean": %s, "standard_error": 0, "interval": null, "episodes": 0, "success_rate": null}'
    (tmp_path / "scores.json").write_text(f'{{"before": {record % mean}, "after": {record % 1.5}}}')
    (run,) = data_of(write_report([tmp_path], tmp_path / "report.html"))["runs"]
    assert [(score["name"], score["mean"]) for score in run["scores"]] == [("after", 1.5)]


def test_a_picture_with_too_many_rows_and_columns_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    cells = [{"panel": "", "row": str(i), "column": str(i), "choices": {"a": 1.0}} for i in range(2000)]
    (tmp_path / "policy.json").write_text(json.dumps({"before": cells, "after": cells[:90]}))
    (run,) = data_of(write_report([tmp_path], tmp_path / "report.html"))["runs"]
    assert list(run["policy"]) == ["after"]


def test_runs_of_one_folder_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    data = data_of(write_report([tmp_path / "a" / "run", tmp_path / "b" / "run"], tmp_path / "report.html"))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("states", "warning"),
    [
        ({0: 1}, None),
        (lambda: [1, 2], r"states\(\) returned \[1, 2\]"),
        (lambda: {"row 1": 0}, "has the key 'row 1'"),
        (lambda: {(i, i): i for i in range(150)}, "too many rows and columns"),
    ],
)
def test_states_that_are_no_picture_are_explained_and_end_no_training(tmp_path, caplog, states, warning):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 6})
    agent.states = states
    train(agent, CountdownEnv, episodes=4, num_envs=2, run_dir=tmp_path, eval_episodes=0)
    assert not (tmp_path / "policy.json").exists()
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert bool(left_out) == (warning is not None)
    assert all(re.search(warning, message) for message in left_out)
