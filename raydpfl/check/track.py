"""The contract of a tracker: see `raydpfl.tracking`."""

from pathlib import Path

from raydpfl.check.contract import UntriedClause, hold
from raydpfl.check.example import Example
from raydpfl.errors import ConfigError
from raydpfl.simulation.coordinator import captured_warnings
from raydpfl.tracking import Tracked, check_installed
from raydpfl.tracking.sender import Book, Sender

NAMES = ("cohort", "train_loss", "test_accuracy", "epsilon_pld", "seconds")
SUMMARY = {"status": "completed", "rounds": 6, "best_test_accuracy": 0.5, "holds": []}


def every_round(case: Example) -> str:
    """It takes every round of a run, one without an evaluation too, and how it ended."""
    folder = case.folder / "rounds"
    name, rounds = _send_rounds(case, folder, 0, 3)
    hold(rounds == 3, f"it was sent {rounds} of 3 rounds")
    return f"3 rounds, of a run that it calls {name or 'nothing'}"


def gone_on_with(case: Example) -> str:
    """It goes on with a run that is resumed, and does not begin another one."""
    folder = case.folder / "second"
    name, _ = _send_rounds(case, folder, 0, 3)
    second, rounds = _send_rounds(case, folder, 3, 6)
    hold(second == name, f"the run that it called {name} it then called {second}")
    hold(rounds == 6, f"it was sent {rounds} of 6 rounds")
    return "6 rounds of one run, sent in two parts"


def _send_rounds(case: Example, folder: Path, start: int, stop: int) -> tuple[str, int]:
    """What the tracker calls a run that it was shown some rounds of, and of how many it knows.
    Raises `UntriedClause` where its library is not installed.
    """
    tracker = case.member
    try:
        check_installed([tracker])
    except ConfigError as error:
        raise UntriedClause(f"expected {error.expected}") from None
    folder.mkdir(exist_ok=True)
    book = Book(folder)
    name, rounds = book.entry(tracker.kind)
    run = Tracked(folder, str(folder), "checked", "", case.tree(), name, rounds)
    with captured_warnings() as warning_texts:
        sender = Sender(tracker.kept_in(folder), run, book)
        for t in range(start, stop):
            values = {name: 0.1 * t for name in NAMES}
            sender.put({"round": t, **values, "test_loss": None if t % 2 else 0.5})
        sender.close(SUMMARY)
    hold(not warning_texts, "; ".join(warning_texts))
    return Book(folder).entry(tracker.kind)
