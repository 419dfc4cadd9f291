"""A token file that was damaged after it was packed: the run that comes to it says where, and ends."""

from __future__ import annotations

from pathlib import Path

from commands import ROOT, TINY, events_of, orchestra, printed, train

from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED
from orchestra.run.heartbeat import beats_folder


def test_a_damaged_block_ends_the_run_with_its_place_and_nothing_stays_on_the_node(folder: Path) -> None:
    orchestra(folder, "data", "pack", str(ROOT / "README.md"), "--output", "packed")
    data = ("data=tokens", "data.path=packed", "train.steps=2", "cluster.gpus_per_node=2")
    sound = train(folder, "sound", *TINY, *data)
    assert len(events_of(sound, "finished")) == 3
    file = folder / "packed.bin"
    content = bytearray(file.read_bytes())
    # Valid tokens all the same.
    content[1000:1400] = content[2000:2400]
    file.write_bytes(content)
    run = train(folder, "damaged", *TINY, *data, code=EXIT_DO_NOT_RESTART)
    assert len(events_of(run, "attempt_started")) == 1
    why = printed(folder, "why", "damaged")
    assert (
        f"{file}: damaged in block 0 of 1 (the first is 0), the {len(content)} bytes from offset 0 on" in why
    )
    assert "orchestra data verify" in why
    orchestra(folder, "data", "verify", "packed", code=EXIT_FAILED)
    for each in (sound, run):
        left = beats_folder(each)
        assert list(left.iterdir()) == []
        left.rmdir()
