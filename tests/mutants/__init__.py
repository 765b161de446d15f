"""Mutants: lines of the cache path broken at random, one at a time, and what is heard of each.

    sites.py: places to break -> a copy of the code with one of them broken
              -> playing.py, a process that runs that copy: a few loads on a tiny model, with tapes,
                 which the same broken code replays where answers are wrong
              -> verdict.py: what is heard of it; where not enough, sound code replays, too

`python -m tests.mutants 50 --seed 7` prints a line for each and exits with 1 where answers were
wrong and nobody said so. Faults (tests/faults) are chosen by people; these are chosen by nobody.
"""
