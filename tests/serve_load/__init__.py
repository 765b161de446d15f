"""`replay serve-load` against servers that answer as a tape has it."""
