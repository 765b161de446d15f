"""Tapes that are checked in, and the programs that made them."""
