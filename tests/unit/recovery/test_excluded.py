"""The list of hosts that failed twice: shared without locks, forgotten in time, undone by removing a file."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestra.recovery.excluded_hosts import ExcludeList, Listed, all_lists, entries_of, shared_folder
from orchestra.recovery.incidents import Incident, Kind
from orchestra.recovery.policy import Action, Decision
from orchestra.run.paths import RunDir

ENTRY = Listed(
    "node7", "node7 failed in attempts 2 and 3", "runs/first", (2, 3), ("hang", "SIGBUS"), 1000, 2000
)


@pytest.fixture
def known(tmp_path: Path) -> ExcludeList:
    """A cluster's list with one entry, which ends at 2000."""
    known = ExcludeList(tmp_path, "alps")
    known.add(ENTRY)
    return known


def hosts(known: ExcludeList, now: float) -> list[str]:
    return [entry.host for entry in known.entries(now)]


def test_an_entry_is_read_as_it_was_written_and_counts_for_its_cluster_alone(
    tmp_path: Path, known: ExcludeList
) -> None:
    assert ExcludeList(tmp_path, "alps").entries(1500) == [ENTRY]
    assert ExcludeList(tmp_path, "jura").entries(1500) == []
    assert ExcludeList(tmp_path, None).entries(1500) == []
    assert [known.cluster for known in all_lists(tmp_path)] == ["alps"]
    assert all_lists(tmp_path / "nowhere") == []


def test_what_is_over_is_forgotten_and_its_file_removed(known: ExcludeList) -> None:
    known.add(replace(ENTRY, host="node8", expires=3000))
    assert hosts(known, 2000) == ["node8"]
    assert [file.name for file in known.folder.iterdir()] == ["node8.json"]


def test_the_longer_of_two_entries_stays(known: ExcludeList) -> None:
    known.add(replace(ENTRY, run="runs/other", expires=1800))
    assert known.entries(1500) == [ENTRY]
    longer = replace(ENTRY, run="runs/other", expires=2500)
    known.add(longer)
    assert known.entries(1500) == [longer]


def test_a_clock_far_ahead_keeps_nobody_out_for_ever(known: ExcludeList) -> None:
    known.add(replace(ENTRY, time=1e12, expires=1e12 + 1000))
    assert known.entries(1500) == []


NEVER = json.dumps({**vars(ENTRY), "expires": "never"})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": "node7"}', NEVER, "\x00\xff"])
def test_a_file_that_says_nothing_leaves_nobody_out(known: ExcludeList, text: str) -> None:
    known.add(replace(ENTRY, host="node8"))
    known.file("node7").write_text(text)
    assert hosts(known, 1500) == ["node8"]
    assert known.unreadable() == [known.file("node7")]


def test_a_file_under_another_hosts_name_leaves_nobody_out(known: ExcludeList) -> None:
    known.file("node7").rename(known.file("node8"))
    assert known.entries(1500) == []
    assert known.unreadable() == [known.file("node8")]


def test_a_folder_in_the_place_of_a_file_and_of_the_list_harm_nobody(tmp_path: Path) -> None:
    known = ExcludeList(tmp_path, "alps")
    known.file("node7").mkdir(parents=True)
    assert known.entries(1500) == []
    other = ExcludeList(tmp_path, "jura")
    other.folder.write_text("not a folder")
    assert other.entries(1500) == []
    with pytest.raises(FileExistsError):
        other.add(ENTRY)


def test_names_stay_inside_the_list(tmp_path: Path) -> None:
    known = ExcludeList(tmp_path / "runs", "../../evil")
    known.add(replace(ENTRY, host="../../../outside"))
    assert hosts(known, 1500) == ["../../../outside"]
    assert [file for file in tmp_path.rglob("*.json") if known.folder not in file.parents] == []
    assert [file.name for file in tmp_path.iterdir()] == ["runs"]


def _write_many(folder: Path, writer: int) -> None:
    known = ExcludeList(folder, "alps")
    for number in range(30):
        known.add(replace(ENTRY, host=f"node{number % 5}", run=f"writer-{writer}", expires=2000 + number))
        assert all(entry.reason == ENTRY.reason for entry in known.entries(1500))
        # Removes what is over while the others write it anew.
        known.entries(2000 + number - 20)


def test_many_writers_and_removers_leave_whole_files_and_no_drafts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    known = ExcludeList(tmp_path, "alps")
    assert sorted(hosts(known, 1500)) == [f"node{number}" for number in range(5)]
    assert known.unreadable() == []
    assert {file.name for file in known.folder.iterdir()} == {f"node{number}.json" for number in range(5)}


def test_an_entry_renewed_while_it_is_removed_stays(
    known: ExcludeList, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = replace(ENTRY, expires=9000)
    rename = Path.rename

    def renew_first(place: Path, target: Path) -> Path:
        known.add(renewed)
        return rename(place, target)

    monkeypatch.setattr(Path, "rename", renew_first)
    assert known.entries(3000) == []
    monkeypatch.undo()
    assert known.entries(3000) == [renewed]


def incident(attempt: int, cause: str, *blamed: str) -> Incident:
    return Incident(attempt, Kind.hang, cause, time=1000.0 + attempt, code=1, blamed=blamed)


def test_entries_hold_the_evidence_of_the_last_two_incidents_against_the_host(tmp_path: Path) -> None:
    decision = Decision(Action.replace, 1, "failed twice", exclude=("node7", "node9"), listed=("node7",))
    log = [incident(0, "old", "node7"), incident(1, "hang", "node7"), incident(2, "other", "node1")]
    log.append(incident(3, "SIGBUS", "node7", "node9"))
    run = RunDir(tmp_path / "runs" / "first")
    (entry,) = entries_of(decision, log, run, 1000.0, 24.0)
    assert (entry.host, entry.attempts, entry.causes) == ("node7", (1, 3), ("hang", "SIGBUS"))
    assert (entry.run, entry.expires) == (str(run.path), 1000.0 + 24 * 3600)


def test_members_of_a_sweep_share_the_list_of_the_runs_beside_it(tmp_path: Path) -> None:
    run, member = RunDir(tmp_path / "first"), RunDir(tmp_path / "grid" / "003")
    member.path.mkdir(parents=True)
    (tmp_path / "grid" / "sweep.json").write_text("{}")
    assert shared_folder(run.path.parent) == shared_folder(member.path.parent) == tmp_path
