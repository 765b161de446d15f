"""Live: records redacted as a server captures them, under a secret that is made and forgotten."""

from __future__ import annotations

import secrets

from statemachine.records import Header, Record

from .pseudonyms import KEY_BYTES, Pseudonyms
from .redacting import NotRedactable, Redactor


class LiveRedactor:
    """`feed` takes a run's records in order, the header first."""

    def __init__(self) -> None:
        self._redactor: Redactor | None = None

    def feed(self, record: Record) -> Record:
        """What goes on tape in a record's place. Raises NotRedactable where that is not known:
        nothing must be written from there on.
        """
        if self._redactor is None:
            repeats = isinstance(record, Header) and bool(record.policy.get("draft_tokens"))
            self._redactor = Redactor(Pseudonyms(secrets.token_bytes(KEY_BYTES), repeats))
        if self._redactor.stopped:
            raise NotRedactable(self._redactor.stopped)
        return self._redactor.feed(record)
