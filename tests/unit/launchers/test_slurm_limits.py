"""How many jobs a cluster takes: what its settings say, and which refusals are about numbers."""

from __future__ import annotations

import pytest

from launchers.slurm.commands import DEFAULT_LIMITS, is_full, parsed_limits


def test_the_size_of_an_array_is_the_clusters_own() -> None:
    assert parsed_limits({"MaxArraySize": "500"}).array_size == 500
    assert parsed_limits({}) == DEFAULT_LIMITS


VIOLATED = "Batch job submission failed: Job violates accounting/QOS policy"


# As sbatch of Slurm 22.05 says them.
@pytest.mark.parametrize(
    "words",
    [
        f"sbatch: AssocMaxSubmitJobLimit; {VIOLATED} (job submit limit, user's size and/or time limits)",
        f"sbatch: QOSMaxSubmitJobPerUserLimit; {VIOLATED}",
        "sbatch: Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_too_many_jobs_are_a_refusal_that_passes(words: str) -> None:
    assert is_full(words)


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: Batch job submission failed: Requested node configuration is not available",
        "sbatch: Batch job submission failed: Invalid account or account/partition combination specified",
    ],
)
def test_a_wrong_job_is_refused_for_good(words: str) -> None:
    assert not is_full(words)
