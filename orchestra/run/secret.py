"""What only the processes of one start of a run know: by it they tell each other from strangers.

The agents keep it in a file that nobody else can read, and tell their ranks where. Standard library only.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

SECRET_VARIABLE = "ORCHESTRA_SECRET_FILE"


def key_of_attempt(attempt: int) -> bytes | None:
    """Return the key of the ranks of one attempt; None in a process that no agent started. Raises OSError."""
    file = os.environ.get(SECRET_VARIABLE)
    if file is None:
        return None
    return hmac.digest(Path(file).read_bytes(), f"words of attempt {attempt}".encode(), "sha256")
