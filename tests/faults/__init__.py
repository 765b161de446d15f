"""Faults: each puts one known bug back, by replacing one function, and says what replay must find.

    catalogue.ALL -> runner.run: play the fault's load on a real engine, with a tape
                  -> the fault is taken off -> replay the tape with the clean code, depth by depth
                  -> compare where replay found it with where the fault's own witness saw it begin

`python -m tests.faults` prints the table; `python -m tests.faults.serve S1 -- ...` runs the server
with a fault in it.
"""
