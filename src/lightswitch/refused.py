"""What the engine refuses wherever it finds out, and train.py tells without a traceback."""


class Refused(Exception):
    """In a line: what was found, what was expected, what to type instead."""

    details = ""  # the tracebacks of the user's own code behind it: they go to the run's log alone

    @property
    def problems(self) -> list[str]:
        return [str(self)]


class ToldElsewhere(Refused):
    """Another process of the run tells it: this one says nothing."""

    @property
    def problems(self) -> list[str]:
        return []


class LostRank(RuntimeError):
    """A rank that failed, or did not do in time what the others did: it is named, and no user can mend it."""
