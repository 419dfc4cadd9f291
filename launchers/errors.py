"""The one exception of this package. Callers translate it into their own."""

from __future__ import annotations


class LauncherError(Exception):
    """Raised when a process cannot be started or ended; the message says what was found and what to do."""
