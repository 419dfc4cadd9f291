"""Pages of `orchestra report` in a headless browser: of a real run that was killed and rolled back, of a
large run and of a sweep. Whether every plot is drawn, nothing is asked for, and keys do what a pointer does.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from commands import TINY, environment, orchestra, run_of, train, words
from support.browser import Browser
from support.long_runs import BEGAN, POWER_W, STEP_S, lines, long_run, long_sweep, row
from support.report_pages import SECTIONS, assert_prints, assert_sound, data_of, focus, serious, texts

from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.step_times import read_step_times

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_run_that_was_killed_and_went_back_is_told_as_its_files_tell_it(
    browser: Browser, tmp_path: Path
) -> None:
    faults = "{at_step: 12, rank: 1, fault: sigkill},{attempt: 1, at_step: 24, rank: 0, fault: spike}"
    train(
        tmp_path,
        "story",
        *TINY,
        "train.steps=32",
        "train.log_every=1",
        "checkpoint.every_steps=5",
        "cluster.gpus_per_node=2",
        "recovery.straggler_every_steps=1",
        "train.profile={enabled: true, steps: [2, 3]}",
        "recovery.loss_spike.action=roll_back",
        "recovery.loss_spike.window=8",
        # The planned one is ten thousand times as large, and noise none.
        "recovery.loss_spike.factor=100",
        "recovery.roll_back.steps_before=4",
        "recovery.roll_back.skip_steps=8",
        f"recovery.inject=[{faults}]",
    )
    run = run_of(tmp_path, "story")
    said = orchestra(tmp_path, "report", "story").stdout
    assert "Finished 32 of 32 steps" in said
    page = run.path / "report.html"
    assert_sound(browser, page)
    own = [*read_step_times(run)]
    assert {each.rank for each in own} == {0, 1}
    (shown,) = data_of(page)["runs"]
    assert {each["rank"] for each in shown["heat"]["ranks"]} == {0, 1}
    assert [each["kind"] for each in shown["attempts"]] == ["rank_failed", "loss", "finished"]
    assert shown["attempts"][0]["cause"] == "killed by SIGKILL"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    last = {row["step"]: row["loss"] for row in rows}
    columns = shown["curves"]["columns"]
    assert columns["step"] == list(range(1, 33))
    assert columns["loss"] == pytest.approx([last[step] for step in columns["step"]], rel=1e-5)
    assert len(rows) == len(columns["step"]) + shown["void"]["num_rows"]
    # The browser is at 1280 pixels now: what a reader sees of it.
    assert [each for each in SECTIONS if not browser.value(f"!!document.getElementById('{each}')")] == []
    ends = texts(browser, "#attempts tbody tr")
    assert "rank failed (planned)" in ends[0]
    assert "killed by SIGKILL" in ends[0]
    assert "rolled back (planned)" in ends[1]
    assert_traces_are_linked_and_energy_says_why_not(browser, run, shown)
    assert "energy not measured (ranks train on CPUs" in " ".join(
        orchestra(tmp_path, "status", "story").stdout.split()
    )
    focus(browser, "#plot-loss [role=slider]")
    browser.press("Home")
    first = browser.value("document.activeElement.getAttribute('aria-valuetext')")
    assert first.startswith(f"step 1, {last[1]:.4f}")
    browser.press("ArrowRight", "ArrowRight")
    assert f"step 3, {last[3]:.4f}" in texts(browser, "#plot-loss .tip")[0].replace("step 3", "step 3, ")
    browser.value("document.body.append(document.createElement('button'))")
    assert [each.partition(" ")[0] for each in serious(browser)] == ["button-name"]
    assert_prints(browser, page)


def assert_traces_are_linked_and_energy_says_why_not(browser: Browser, run: RunDir, shown: Record) -> None:
    """Look at two sections of the page that is open, of a run on CPUs that traced two steps."""
    (trace,) = [each for each in shown["traces"] if each["kind"] == "trace"]
    assert (trace["rank"], trace["first_step"], trace["last_step"]) == (0, 2, 3)
    places = browser.value("[...document.querySelectorAll('#profile a')].map(each => each.href)")
    assert run.profile / trace["name"] in [Path(unquote(urlsplit(place).path)) for place in places]
    assert len(places) == len(shown["traces"])
    parts = shown["profile"]["parts_s"]
    assert texts(browser, "#profile figure > div:not(.plot) tbody th")[: len(parts)] == [*parts]
    energy, hours, _ = texts(browser, "#energy dd")
    assert energy == "not measuredranks train on CPUs: energy is read from GPUs alone"
    assert hours == "not measuredits ranks are on CPUs"


def test_a_large_run_is_small_and_its_cells_are_reached_by_keys(browser: Browser, tmp_path: Path) -> None:
    long_run(tmp_path / "runs", steps=20_000, nodes=8)
    orchestra(tmp_path, "report", "long", "-o", "long.html")
    page = tmp_path / "long.html"
    assert page.stat().st_size < 1_000_000
    assert_sound(browser, page)
    joules = POWER_W * STEP_S * 64 * (12_000 + 10_000)
    assert texts(browser, "#energy dd")[0].startswith(f"{joules / 1e6:.0f} MJ{joules / 2e7:.3g} J a token")
    focus(browser, "#ranks [role=slider]")
    browser.press("End")
    assert "rank 0 on node1, slowest of steps" in browser.value(
        "document.activeElement.getAttribute('aria-valuetext')"
    )
    browser.value("document.querySelector('#ranks summary').click()")
    browser.value("new Promise(done => setTimeout(done))")
    assert texts(browser, "#ranks tbody tr th")[0] == "13", "the slowest rank comes first"
    browser.value("document.querySelector('#plot-loss input[value=time_s]').click()")
    browser.value("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert "cursor over time" in browser.value(
        "document.querySelector('#plot-loss [role=slider]').getAttribute('aria-label')"
    )


def test_a_sweep_is_sorted_and_filtered_by_keys(browser: Browser, tmp_path: Path) -> None:
    long_sweep(tmp_path / "runs", 120)
    orchestra(tmp_path, "report", "lr-sweep")
    page = tmp_path / "runs" / "lr-sweep" / "report.html"
    assert_sound(browser, page)
    losses = texts(browser, "#members tbody td:nth-child(4)")
    assert losses == sorted(losses)
    focus(browser, "#members thead th:nth-child(2) button")
    browser.press("Enter")
    assert texts(browser, "#members th[aria-sort=ascending]") == ["lr"]
    rates = [float(text) for text in texts(browser, "#members tbody td:nth-child(2)")]
    assert rates == sorted(rates)
    browser.press("Enter")
    assert texts(browser, "#members th[aria-sort=descending]") == ["lr"]
    focus(browser, "#members input")
    browser.press(*"seed=1 lr<0.0002 finished")
    members = data_of(page)["sweep"]["members"]
    wanted = [
        each["index"]
        for each in members
        if each["overrides"]["train.seed"] == 1
        and each["overrides"]["optim.lr"] < 2e-4
        and each["state"] == "finished"
    ]
    assert wanted
    assert sorted(int(text) for text in texts(browser, "#members tbody th")) == wanted
    assert texts(browser, "#members [role=status]") == [f"{len(wanted)} of 120 rows"]


def test_a_served_page_is_drawn_anew_for_whoever_knows_the_secret(tmp_path: Path) -> None:
    run = long_run(tmp_path / "runs", steps=40, nodes=1)
    command = words("report", "long", "--serve")
    serving = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert serving.stdout is not None
    try:
        address = serving.stdout.readline().strip()
        port = int(address.split(":")[2].partition("/")[0])
        first = urllib.request.urlopen(address).read().decode()
        assert '"step":40' in first
        assert 'http-equiv="refresh"' in first
        lines(run.metrics, [row(step, BEGAN + step, 1) for step in range(21, 43)])
        assert '"step":42' in urllib.request.urlopen(address).read().decode()
        for path, host, status in (
            ("/", "127.0.0.1", 404),
            (address.rpartition(":")[2], "evil.example", 403),
        ):
            asking = http.client.HTTPConnection("127.0.0.1", port)
            asking.request("GET", "/" + path.partition("/")[2], headers={"Host": host})
            assert asking.getresponse().status == status
            asking.close()
        taken = subprocess.run(
            [*command, "--port", str(port)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert taken.returncode == 2
        assert f"--port {port}: Address already in use; use another one" in taken.stderr
    finally:
        serving.send_signal(signal.SIGINT)
        serving.communicate()
    assert serving.returncode == 0


def test_plans_are_drawn_without_a_run(browser: Browser, tmp_path: Path) -> None:
    overrides = ("model=llama3_8b", "cluster.nodes=2", "parallelism=zero3", "train.global_batch_size=64")
    said = orchestra(tmp_path, "plan", *overrides, "--json", "--report", "one.html")
    assert_sound(browser, tmp_path / "one.html")
    plan = json.loads(said.stdout)
    assert data_of(tmp_path / "one.html")["plan"] == plan
    total = browser.value("document.querySelector('#memory [role=img]').getAttribute('aria-label')")
    assert f"in all {plan['peak_memory_bytes'] / 2**30:.1f} GiB" in total
    orchestra(tmp_path, "plan", *overrides, "--search", "--report", "search.html")
    assert_sound(browser, tmp_path / "search.html")
    found = data_of(tmp_path / "search.html")["plan"]
    assert len(texts(browser, "#pareto tbody tr")) == len(found["pareto"]) > 1
    assert len(texts(browser, "#pareto circle")) == len(found["pareto"])
    refused = orchestra(tmp_path, "plan", *overrides, "--script", "--report", "x.html", code=2)
    assert "--report draws one layout or a --search, not --script" in refused.stderr


def test_runs_side_by_side_and_runs_that_never_started(browser: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    long_run(runs, steps=400, nodes=1, slow=(3, 1.2))
    (runs / "long").rename(runs / "one")
    long_run(runs, steps=300, nodes=1, slow=(3, 1.0))
    config = (runs / "long" / "config.yaml").read_text()
    (runs / "long" / "config.yaml").write_text(config.replace("seed: 0", "seed: 4"))
    (runs / "new").mkdir()
    (runs / "new" / "run.json").write_text('{"name":"new","jobs":[],"steps":9}')
    orchestra(tmp_path, "report", "one", "long", "new", "-o", "three.html")
    assert_sound(browser, tmp_path / "three.html")
    assert "3 runs side by side" in texts(browser, "h1")
    assert any("no attempt of it has started" in text for text in texts(browser, ".notes li"))
    assert any("train.seed" in text for text in texts(browser, "#configuration tbody tr"))
    refused = orchestra(tmp_path, "report", "one", "long", code=2)
    assert "say where: -o FILE" in refused.stderr
