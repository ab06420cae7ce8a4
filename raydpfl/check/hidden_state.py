"""The contract of what client actors carry out: what it keeps in Python."""

from raydpfl.check.contract import hold
from raydpfl.check.example import Example
from raydpfl.models.hidden_state import changed_names


def no_shared_state(case: Example) -> str:
    """Its class and its file keep nothing from one client to the next."""
    names = changed_names(case.first_state, case.state())
    hold(not names, f"{', '.join(names[:5])} changes")
    return "as when it was imported"
