"""The state machine: every length and every block of a KV cache, and the only ways to change them.

    events.py       what can happen, frozen, in the past tense
    sequence.py     one sequence: committed, speculative and pad rows, tables, content
    state.py        a pool: sequences, blocks (held, cached, free), prefix index
    commands.py     what is wanted -> events, block ids included; refuses what may not be
                    (supply.py: which blocks are taken next)
    transitions.py  state + event -> state, by a table of handlers; start here for the rules
                    (lifetime, sharing, appending, column, trimming, publication: the handlers)
    prefix.py       what can be found again; tags.py: what identifies a row
    invariants.py   what holds in every state; digest.py: 64 bits of a state
    codec.py        records.py as the bytes of a tape, and back; script.py: caches driven by hand

Pure: imports no MLX and no other folder, reads no clock, file, environment or random source.
"""
