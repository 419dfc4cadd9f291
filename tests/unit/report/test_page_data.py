"""The data of a page of `orchestra report`: its numbers are those of the raw files, and no spike is lost."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.long_runs import BEGAN, RESTORE_S, START_S, STEP_S, lines, long_run, long_sweep, row

from orchestra.report.layouts import read_run as read_scanned
from orchestra.report.page.configurations import changes_between_attempts, differing
from orchestra.report.page.curves import MOST_ROWS, curves, thinned
from orchestra.report.page.html_page import html_page
from orchestra.report.page.life import expert_move_rows
from orchestra.report.page.own_times import MOST_COLUMNS, heat_map, slow_ones
from orchestra.report.page.run_page import read_run, run_page
from orchestra.report.page.sweep_page import sweep_page
from orchestra.report.run_state import read_sweep_state
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.step_times import RankStepTimes, StepTimesFile, read_step_times

STORED_RUNS = Path(__file__).parents[2] / "golden" / "recorded" / "runs.tar.xz"
NOW = 1.8e9
PAGE_KEYS = {"verdict", "curves", "accounts", "attempts", "heat", "memory", "checkpoints", "config", "notes"}


def page_of(run: RunDir) -> Record:
    return run_page(read_run(run, NOW), NOW)


def raw(run: RunDir, name: str) -> list[Record]:
    files = [run.metrics] if name == "metrics" else sorted(run.events.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs that earlier versions have written."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED_RUNS) as archive:
        archive.extractall(folder, filter="data")
    return folder / "runs"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return long_run(tmp_path_factory.mktemp("long"), steps=6_000, nodes=2)


def test_numbers_of_a_page_are_those_of_the_raw_files(stored: Path) -> None:
    run = RunDir(stored / "rolled-back")
    page, events, rows = page_of(run), raw(run, "events"), raw(run, "metrics")
    assert page["curves"]["columns"]["loss"] == pytest.approx([each["loss"] for each in rows], rel=1e-5)
    assert page["figures"]["loss"] == rows[-1]["loss"]
    times = [event["time"] for event in events]
    parts = [value for key, value in page["accounts"].items() if key not in ("wall_s", "goodput")]
    assert (
        math.fsum(parts)
        == pytest.approx(max(times) - min(times))
        == pytest.approx(page["accounts"]["wall_s"])
    )
    (back,) = [event for event in events if event["event"] == "roll_back"]
    first, second = page["attempts"]
    # Attempt 0 found step 18 bad: 17 steps were trained, and 11 to 17 are trained again.
    assert (first["kind"], first["rule"], first["reached_step"]) == ("loss", "roll_back", back["step"] - 1)
    assert first["lost_steps"] == back["step"] - 1 - back["to"]
    trained = {event["attempt"]: event["time"] for event in events if event["event"] == "training_started"}
    assert first["down_s"] == pytest.approx(trained[1] - (first["ended_s"] + min(times)))
    assert (second["kind"], second["lost_steps"]) == ("finished", None)
    committed = [event for event in events if event["event"] == "checkpoint_committed"]
    saves = [(each["step"], each["bytes"], each["write_s"]) for each in page["checkpoints"]]
    told = [(each["step"], each["bytes"], each["seconds"]) for each in committed]
    assert sorted(saves) == sorted(told)
    assert page["verdict"]["sentence"].startswith("Finished 30 of 30 steps, 7.3 % goodput; 1 roll-back")


def test_every_stored_run_of_an_older_version_has_a_page(stored: Path) -> None:
    names = [path.name for path in stored.iterdir() if (path / "run.json").exists()]
    assert len(names) >= 7
    for name in names:
        page = page_of(RunDir(stored / name))
        assert page.keys() >= PAGE_KEYS
        assert page["verdict"]["sentence"].endswith(".")
        assert page["memory"]["planned_bytes"] == sum(page["memory"]["components"].values())


def test_a_lost_node_is_told_with_what_it_cost(long: RunDir) -> None:
    page = page_of(long)
    first, second = page["attempts"]
    assert (first["kind"], first["host"], first["rule"]) == ("node_lost", "node2", "spare_node")
    assert (first["lost_steps"], first["lost_s"]) == (600, 600 * STEP_S)
    assert first["down_s"] == pytest.approx(START_S)
    assert page["accounts"]["lost_s"] == pytest.approx(600 * STEP_S)
    assert page["accounts"]["restore_s"] == pytest.approx(RESTORE_S)
    assert second["began_after_step"] == 3_000
    assert "1 node loss cost 5 min 40 s, 600 steps trained again" in page["verdict"]["sentence"]
    assert page["void"]["num_rows"] == 600
    assert page["nodes"][0]["host"] == "node2"


def test_experts_that_moved_are_told_with_what_was_gained() -> None:
    moved = {"step": 10, "experts": 4, "layers": 2, "bytes": 960, "seconds": 0.5}
    loads = {"load_before": 1.5, "load_expected": 1.25}
    told = {"event": "experts_moved", "time": BEGAN + 7, "attempt": 1, "rank": 0, **moved, **loads}
    events = [{"event": "checkpoint_started", "time": BEGAN, "attempt": 1, "step": 10}, told]
    assert expert_move_rows(events, BEGAN) == [{"time_s": 7, "attempt": 1, **moved, **loads}]


def test_curves_are_thinned_and_keep_what_a_reader_looks_for() -> None:
    rows = [row(step, BEGAN + step) for step in range(1, 50_001)]
    rows[12_345] |= {"loss": 99.0}
    rows[23_456] |= {"loss": None}
    rows[34_567] |= {"grad_norm": 1e6}
    rows[45_678] |= {"tokens_per_s": 3.0, "eval/wiki/loss": 2.5}
    kept = thinned(rows)
    assert len(kept) <= MOST_ROWS + 10
    assert [each["step"] for each in kept] == sorted(each["step"] for each in kept)
    assert {1, 50_000, 12_346, 23_457, 34_568, 45_679} <= {each["step"] for each in kept}
    drawn = curves(rows, 7, BEGAN)
    assert (drawn["num_rows"], drawn["is_thinned"]) == (50_000, True)
    columns = drawn["columns"]
    assert {len(values) for values in columns.values()} == {len(kept)}
    assert columns["flops"] == [each["tokens"] * 7 for each in kept]
    assert columns["time_s"][-1] == 50_000
    assert [value for value in drawn["sources"]["eval/wiki/loss"] if value is not None] == [2.5]


def test_the_heat_map_has_the_slowest_of_each_cell_and_finds_the_slow_rank(long: RunDir) -> None:
    times = [*read_step_times(long)]
    assert len(times) == 2 * 16
    heat = heat_map(times)
    assert heat is not None
    assert len(heat["columns"]) <= MOST_COLUMNS
    # As trained last: steps 3001 to 3600 are of the second attempt.
    newest: dict[int, dict[int, float]] = {}
    for each in times:
        newest.setdefault(each.rank, {}).update(each.seconds)
    for place, (first, last) in enumerate(heat["columns"]):
        for number, facts in enumerate(heat["ranks"]):
            inside = [own for step, own in newest[facts["rank"]].items() if first <= step <= last]
            assert heat["cells"][number][place] == pytest.approx(max(inside), rel=1e-3)
    slow = slow_ones(heat)
    assert [(each.rank, each.host) for each in slow] == [(13, "node2")]
    assert slow[0].ratio == pytest.approx(1.3, rel=0.01)
    assert "rank 13 on node2 was 30 % slower" in " ".join(page_of(long)["verdict"]["evidence"])
    assert heat_map([]) is None
    (alone,) = heat_map([RankStepTimes(0, 0, "node1", {10: 0.5})])["ranks"]  # type: ignore[index]
    assert alone["ratio"] is None


def test_who_took_another_s_place_and_stages_of_other_work_are_not_slow() -> None:
    steps = range(10, 110, 10)
    quick, slow = (dict.fromkeys(steps, own) for own in (0.1, 0.2))
    later = {step + 100: 0.1 for step in steps}
    before = [RankStepTimes(0, rank, f"node{rank}", slow if rank == 2 else quick) for rank in range(4)]
    assert [(each.rank, each.host) for each in slow_ones(heat_map(before))] == [(2, "node2")]
    hosts = ["node0", "node1", "spare", "node3"]
    after = [*before, *(RankStepTimes(1, rank, host, later) for rank, host in enumerate(hosts))]
    heat = heat_map(after)
    assert slow_ones(heat) == []
    assert heat is not None
    assert [each["steps"] for each in heat["ranks"] if each["host"] == "spare"] == [10]
    last_stage = [RankStepTimes(0, rank, f"node{rank}", slow if rank > 1 else quick) for rank in range(4)]
    assert len(slow_ones(heat_map(last_stage))) == 2
    assert slow_ones(heat_map(last_stage, num_stages=2)) == []


def test_own_times_are_written_few_lines_long_and_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    written = StepTimesFile(run, 2, 7)
    own = {step: step / 1000 for step in range(10, 5_010, 10)}
    for step, seconds in own.items():
        written.add(step, seconds)
    written.close()
    (file,) = run.times.iterdir()
    assert len(file.read_text().splitlines()) < 10
    with file.open("a") as torn:
        torn.write('{"host":"node1","steps":[6000],"own_')
    (run.times / "attempt-002.rank-00008.jsonl").write_text('{"steps":[1,"x",3],"own_s":[0.1,0.2,NaN]}\n[]\n')
    (run.times / "notes.txt").write_text("none of ours")
    read = [*read_step_times(run)]
    assert [(each.attempt, each.rank, each.seconds) for each in read] == [(2, 7, own), (2, 8, {1: 0.1})]
    # Of very many times those of the same steps of all ranks are taken.
    (run.times / "attempt-002.rank-00009.jsonl").write_bytes(file.read_bytes())
    taken = [each.seconds for each in read_step_times(run, most=200) if each.rank != 8]
    assert taken[0] == taken[1] == {step: own[step] for step in taken[0]}
    assert 60 <= len(taken[0]) <= 220
    assert max(taken[0]) - min(taken[0]) > 4_000
    # A folder that cannot be made costs the times alone.
    (tmp_path / "file").write_text("")
    full = StepTimesFile(RunDir(tmp_path / "file"), 0, 0)
    full.add(1, 0.1)
    full.close()


def test_damaged_missing_and_strange_files_make_a_page_that_says_so(stored: Path, tmp_path: Path) -> None:
    whole = page_of(RunDir(stored / "restarted"))
    run = RunDir(shutil.copytree(stored / "restarted", tmp_path / "torn"))
    for file in (run.metrics, *run.events.glob("*.jsonl")):
        with file.open("a") as torn:
            torn.write('{"time":1,"step":9')
    torn = page_of(run)
    assert (torn["curves"], torn["attempts"], torn["accounts"]) == (
        whole["curves"],
        whole["attempts"],
        whole["accounts"],
    )
    run.config.write_text("model: [of another version\n")
    run.record.unlink()
    page = page_of(run)
    assert any("run.json is missing" in note for note in page["notes"])
    assert any(note.startswith("no plan and no FLOPs") for note in page["notes"])
    assert (page["config"], page["memory"], "flops" in page["curves"]["columns"]) == ({}, None, False)
    assert page["curves"]["columns"]["loss"] == whole["curves"]["columns"]["loss"]
    run.metrics.unlink()
    assert any("metrics.jsonl has no row" in note for note in page_of(run)["notes"])
    shutil.rmtree(run.events)
    assert any("no attempt of it has started" in note for note in page_of(run)["notes"])
    empty = page_of(RunDir(tmp_path / "nothing"))
    assert "it never trained a step" in empty["verdict"]["sentence"]
    assert empty["accounts"]["wall_s"] == 0


def test_layouts_of_no_node_and_overrides_that_are_no_list_end_no_command(
    stored: Path, tmp_path: Path, orchestra: CommandLine
) -> None:
    runs = tmp_path / "runs"
    run = RunDir(shutil.copytree(stored / "restarted", runs / "edited"))
    record, where = json.loads(run.record.read_text()), ("--dir", str(runs))
    newest = max(read_events(run, ("attempt_started",)), key=lambda event: int(event["attempt"]))
    for key, overrides in (("nodes", 7), ("ranks_per_node", "x=1"), ("micro_batch_size", {"a": 1})):
        for value in (0, -1):
            with run.event_file("edited").open("a") as file:
                file.write(json.dumps({**newest, "time": NOW, key: value}) + "\n")
        run.record.write_text(json.dumps({**record, "overrides": overrides}))
        assert page_of(run)["overrides"] == []
        assert "edited" in orchestra("report", "edited", *where).out
        assert "edited: " in orchestra("why", "edited", *where).out
        assert "edited" in orchestra("watch", "edited", "--once", *where).out
        assert read_scanned(run, NOW).name == "edited"
    run.record.write_text(json.dumps({**record, "overrides": [None, 3, ["x"]]}))
    assert page_of(run)["overrides"] == ["None", "3", "['x']"]


def test_a_page_does_not_take_the_place_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "nothing")
    run.path.mkdir()
    run.record.write_text("{}")
    for place, says in (("", "--output: it is empty; give a path"), (".", "--output .: it is a folder")):
        assert says in orchestra("report", "./nothing", "-o", place, code=2).err
    refused = orchestra("report", "./nothing", "-o", "nothing/run.json/page.html", code=2).err
    assert "page.html: cannot be written (" in refused
    assert refused.endswith("with --output FILE\n")
    assert [path.name for path in tmp_path.iterdir()] == ["nothing"]


def test_saves_that_failed_or_were_skipped_are_told_with_their_reasons(long: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(long.path, tmp_path / "saves"))
    base = {"attempt": 1, "rank": 0}
    told = [
        {
            **base,
            "time": NOW,
            "event": "checkpoint_skipped",
            "step": 5_000,
            "count": 1,
            "why": "still written",
        },
        {**base, "time": NOW, "event": "checkpoint_started", "step": 5_001, "blocked_s": 0.5},
        {**base, "time": NOW, "event": "checkpoint_failed", "step": 5_001, "reasons": {"0": "disk full"}},
    ]
    lines(run.event_file("late"), told)
    page = page_of(run)
    saves = {each["step"]: each for each in page["checkpoints"]}
    assert (saves[5_000]["state"], saves[5_001]["state"]) == ("skipped", "failed")
    assert "still written" in saves[5_000]["reason"]
    assert "disk full" in saves[5_001]["reason"]
    assert saves[6_000]["stall_s"] == 0.25
    assert "1 checkpoint could not be written" in page["verdict"]["evidence"]


def test_of_more_saves_than_are_listed_all_count(tmp_path: Path) -> None:
    run = long_run(tmp_path, steps=200, nodes=1)
    base = {"attempt": 0, "rank": 0}
    saves: list[Record] = []
    for number in range(500):
        step, at = 10_000 + number, NOW - 500 + number
        saves.append({**base, "time": at, "event": "checkpoint_started", "step": step, "blocked_s": 0.5})
        came = "checkpoint_failed" if number < 50 else "checkpoint_committed"
        saves.append({**base, "time": at, "event": came, "step": step, "reasons": {}})
    before = page_of(run)
    lines(run.event_file("many"), saves)
    page = page_of(run)
    assert len(page["checkpoints"]) == 400
    assert page["num_checkpoints"] == before["num_checkpoints"] + 500
    assert page["stall_s"] == pytest.approx(before["stall_s"] + 250)
    assert any("50 checkpoints could not be written" in text for text in page["verdict"]["evidence"])


def test_a_save_that_a_roll_back_made_void_is_not_the_newest(stored: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(stored / "rolled-back", tmp_path / "rolled-back"))
    (back,) = [event for event in raw(run, "events") if event["event"] == "roll_back"]
    for file in run.events.glob("*.jsonl"):
        lines_ = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [each for each in lines_ if each["time"] <= back["time"]]
        file.write_text("".join(json.dumps(each) + "\n" for each in kept))
    newest = page_of(run)["newest_checkpoint"]
    assert newest["step"] == back["to"]


def test_a_sweeps_page_ranks_its_members_and_names_the_best(tmp_path: Path) -> None:
    sweep = long_sweep(tmp_path, 41)
    page = sweep_page(read_sweep_state(sweep, NOW))
    last = {
        index: json.loads(sweep.member(index).metrics.read_text().splitlines()[-1])["loss"]
        for index in range(41)
    }
    finished = [index for index in last if index % 10 != 9]
    assert page["best"] == sorted(finished, key=lambda index: last[index])[:12]
    assert [each["values"]["loss"] for each in page["members"]] == [last[index] for index in range(41)]
    assert page["keys"] == ["optim.lr", "train.seed"]
    assert page["members"][40]["overrides"] == {"optim.lr": 1e-4, "train.seed": 1.0}
    assert page["counts"] == {"finished": 37, "failed": 4}
    assert page["curves"][str(page["best"][0])]["loss"][-1] == pytest.approx(last[page["best"][0]], rel=1e-5)


def test_configurations_show_what_differs_and_no_secret(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(
        "optim: {lr: 0.1, betas: [1, 2]}\ntrain: {tokens: 5}\n"
        "data: {api_key: planted, secret_access_key: planted, hf_token: planted, path: x}\n"
    )
    run.record.write_text(json.dumps({"overrides": ["optim.lr=0.1", "+data.options.auth_key=planted"]}))
    run.config_of_attempt(0).write_text("optim: {lr: 0.2, betas: [1, 2]}\ndata: {path: x}\n")
    page = page_of(run)
    assert page["config"] == {"optim.lr": 0.1, "optim.betas": "[1, 2]", "train.tokens": 5, "data.path": "x"}
    assert page["overrides"] == ["optim.lr=0.1", "+data.options.auth_key=(not shown)"]
    changes = changes_between_attempts(run)
    assert changes == {
        "titles": ["up to attempt 0", "since then"],
        "keys": {"optim.lr": [0.2, 0.1], "train.tokens": [None, 5]},
    }
    assert differing([{"a": 1}, {"a": 1, "b": 2}]) == {"b": [None, 2]}
    assert "planted" not in json.dumps(page)


def test_all_steps_of_a_run_whose_agent_still_lives_are_trained(long: RunDir) -> None:
    files = read_run(long, NOW)
    ending = replace(files, state=replace(files.state, state=RunPhase.running))
    said = run_page(ending, NOW)["verdict"]
    assert said["sentence"].startswith("Trained 6,000 of 6,000 steps, and is ending, ")
    assert not any("logs" in word for word in said["next"])


def test_no_text_of_a_run_becomes_html(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    data = {"runs": [{"name": evil, "verdict": {"sentence": evil}, "loss": float("nan")}], "sweep": None}
    page = html_page(evil, data)
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "&lt;/script&gt;" in page
    block = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["runs"][0] == {"name": evil, "verdict": {"sentence": evil}, "loss": None}
    for forbidden in ("http://", "https://", "@import", "url(", "src="):
        assert forbidden not in page.replace("http://www.w3.org/2000/svg", "").replace("url(#${clip})", ""), (
            forbidden
        )
