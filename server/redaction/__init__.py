"""Redaction: a tape without what users said, that folds and plans as the tape itself does.

Owns pseudonyms (numbers and words in the place of tokens, names and texts, from a secret), and what
becomes of each record and of a state under them. `redacting.Redactor` takes a tape's records one by
one: of a tape that is there (`replay redact`), or as a server writes them (`live`).
"""
