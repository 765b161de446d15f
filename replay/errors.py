"""Errors of replay: one sentence each, with what to do; the command line prints it and exits 2."""

from __future__ import annotations


class ReplayError(Exception):
    """Base of what replay raises on purpose."""


class Unusable(ReplayError):
    """A tape that cannot be read, or not at the depth that was asked for."""
