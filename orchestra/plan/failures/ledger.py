"""Where a simulated run's seconds went, and which of its steps count: a rollback makes some void again."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestra.recovery.accounting import Account, Accounts


@dataclass
class _Stretch:
    """Steps that were trained at one pace and are not committed yet."""

    first: int
    last: int
    step_s: float


@dataclass
class Ledger:
    """The accounts of `orchestra.recovery.accounting`, filled as time passes."""

    step: int = 0
    committed: int = 0
    _seconds: dict[Account, float] = field(default_factory=lambda: dict.fromkeys(Account, 0.0))
    _open: list[_Stretch] = field(default_factory=list)

    def spend(self, seconds: float, account: Account) -> None:
        """Book seconds that trained nothing."""
        self._seconds[account] += seconds

    def train(self, last: int, step_s: float, seconds: float) -> None:
        """Book the steps up to `last`, which took `seconds` with what was begun of the step behind it."""
        whole_s = (last - self.step) * step_s
        self._seconds[Account.productive] += whole_s
        self._seconds[Account.lost] += max(0.0, seconds - whole_s)
        if last > self.step:
            self._open.append(_Stretch(self.step, last, step_s))
        self.step = last

    def commit(self, step: int) -> None:
        """Note a step that nothing will go back behind."""
        self.committed = step
        self._open = [it for it in self._open if it.last > step]

    def go_back(self, step: int) -> None:
        """Make the steps behind `step` void: what they took is lost."""
        while self._open and self._open[-1].last > step:
            newest = self._open[-1]
            void_s = (newest.last - max(step, newest.first)) * newest.step_s
            self._seconds[Account.productive] -= void_s
            self._seconds[Account.lost] += void_s
            if newest.first >= step:
                self._open.pop()
            else:
                newest.last = step
        self.step = step

    def accounts(self) -> Accounts:
        """Return the seconds by account."""
        return Accounts(**{f"{name.value}_s": seconds for name, seconds in self._seconds.items()})
