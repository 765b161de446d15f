"""replay: reads a tape and names the first place where it and what follows from it disagree.

    reader.py     bytes, wherever they are -> records
    run.py        one pass: every record goes through the fold, then through the depth's checker
    fold.py       events applied again; observed.py compares what the caches saw
    plan.py       the scheduler again          (server.scheduler; no model)
    forward.py    the model again, same batches (kernel, loaded late by models.py)
    reference.py  each request alone            (mlx-lm's own caches)
    report.py     the outcome as text and as JSON; show.py a step or sequence; cli.py exit codes

Imports the kernel only inside of the depths that need it, and never the HTTP side.
"""
