"""The two ways a run can go wrong, told apart by whose fault it is.

>>> raise ConfigError("selection.cohort", 500, "at most the 300 clients of data.clients")
Traceback (most recent call last):
raydpfl.errors.ConfigError: selection.cohort = 500: at most the 300 clients of data.clients
"""

from __future__ import annotations


class ConfigError(ValueError):
    """What was asked for cannot be run. Nothing has been started or written; exit code 2.

    `field` is the dotted key of the config, `value` what was given, `accepted` what would be right.
    """

    def __init__(self, field: str, value: object, accepted: str):
        self.field, self.value, self.accepted = field, value, accepted
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {' '.join(accepted.split())}")

    def __reduce__(self):
        return ConfigError, (self.field, self.value, self.accepted)


class RunError(RuntimeError):
    """A run that had started could not go on; exit code 1."""


class ClientError(RunError):
    """One client's share of a round failed: its id, and what happened there.

    `client` is the client's id in the population, `detail` the reason or the client's own traceback.
    """

    def __init__(self, client: int, detail: str):
        self.client, self.detail = client, detail
        super().__init__(f"client {client}: {detail}")

    def __reduce__(self):
        return ClientError, (self.client, self.detail)


class BudgetError(RunError):
    """The next round would spend more than the privacy budget of the run."""
