"""Serve-load: `replay serve-load TAPE URL`, a recorded load sent to a server, and its answers.

Owns the command and the report. serve_load_tape.py has the load and its times, serve_load_run.py
keeps them, serve_load_client.py talks to the server, serve_load_compare.py judges the answers.
Loads a tokenizer (and so the kernel) only where texts are compared or sent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from attrs import evolve, frozen

from server.settings import is_key
from statemachine.records import Header

from .arguments import TAPE_HELP, number, tell
from .errors import Unusable
from .progress import progress
from .reader import STDIN, Tape, keep_stdin, read_header
from .run import CLEAN, DIVERGED
from .serve_load_client import Client
from .serve_load_compare import COUNTS
from .serve_load_report import LoadCounts, ServeLoadReport, Throughput, Times
from .serve_load_run import Options, Run, Tally
from .serve_load_tape import Load
from .serve_load_text import as_text, verdict
from .words import plural

if TYPE_CHECKING:
    from kernel.tokenizer import Tokenizer

MAX = "max"


@frozen
class Target:
    """A server. model: "" for the first that it names."""

    url: str
    key: str = ""
    model: str = ""
    timeout_s: float = 600.0


def serve_load(path: str, target: Target, options: Options) -> ServeLoadReport:
    """Send a tape's requests to a server. Raises Unusable; then it says what is in the way."""
    return asyncio.run(_serve_load(path, target, options))


async def _serve_load(path: str, target: Target, options: Options) -> ServeLoadReport:
    tape = Tape(path)
    client = Client(target.url, target.key, target.timeout_s)
    try:
        options = evolve(options, model=await client.find_model(target.model))
        with progress(tape, "replay serve-load") as records:
            load = Load(path, records)
            run = Run(client, load, options)
            await run.run()
    finally:
        await client.close()
    if not run.tally.sent:
        raise Unusable(f"{path} holds no request that asks for an answer: there is nothing to send")
    return _report(path, client.base, options, tape, load, run)


def _report(
    path: str, base: str, options: Options, tape: Tape, load: Load, run: Run
) -> ServeLoadReport:
    tally = run.tally
    counts = LoadCounts(
        tally.sent, tally.same, tally.different, tally.failed, tally.uncompared, tally.left,
        tally.unsendable,
    )  # fmt: skip
    first = None if tally.first is None else tally.first[1]
    return ServeLoadReport(
        verdict=verdict(counts, dict(tally.by), first, tally.first_failure),
        exit_code=DIVERGED if tally.different or tally.failed else CLEAN,
        path=path,
        url=base,
        model=options.model,
        speed=options.speed,
        requests=counts,
        compared_by=dict(sorted(tally.by.items())),
        first=first,
        different_sampled=tally.different_sampled,
        failures=dict(sorted(tally.failures.items())),
        first_failure=tally.first_failure,
        latency={
            name: Times(tally.recorded[name].percentiles(), tally.measured[name].percentiles())
            for name in tally.recorded
        },
        recorded=_throughput(tally.recorded_tokens, run.recorded_s),
        measured=_throughput(tally.measured_tokens, run.wall_s),
        in_flight_most=tally.in_flight_most,
        late=tally.late,
        late_most_us=tally.late_most_us,
        stopped=load.stopped,
        notes=(*tape.notes, *_notes(tally, load, options)),
    )


def _throughput(tokens: int, seconds: float) -> Throughput:
    rate = round(tokens / seconds, 1) if seconds > 0 else None
    return Throughput(tokens, round(seconds, 3), rate)


def _notes(tally: Tally, load: Load, options: Options) -> Iterator[str]:
    if not load.timed:
        yield "the tape has no step times: a step counts as 1 ms, and no latency is recorded"
    if tally.by[COUNTS]:
        yield (
            "by counts: the server tells no token ids and there is no tokenizer to compare texts "
            "(--tokenizer gives one), so only numbers of tokens and finish reasons were compared"
        )
    if tally.different_sampled:
        yield (
            f"{tally.different_sampled} of the different answers were drawn at a temperature: "
            "another server draws otherwise, even with the same seed"
        )
    if tally.other_prompts:
        yield (
            f"{plural(tally.other_prompts, 'prompt')} had another number of tokens for the server: "
            "its answers may differ for that"
        )
    if tally.retokenised:
        yield (
            f"{plural(tally.retokenised, 'prompt')} cannot be said as text: that text makes other "
            "tokens, so the answers may differ"
        )
    if tally.carried:
        yield (
            f"{plural(tally.carried, 'request')} came before what is on tape (its start, or a "
            "gap): sent all the same, without recorded times"
        )
    if tally.adapters:
        yield f"{plural(tally.adapters, 'request')} had an adapter on tape: sent to {options.model}"
    if tally.grammars:
        yield f"{plural(tally.grammars, 'request')} had a grammar on tape: sent without it"


def find_tokenizer(header: Header, given: str) -> Tokenizer | None:
    """The given tokenizer, else that of the tape's model where it is at hand. Raises Unusable."""
    path = given or header.model
    if not given and not _at_hand(path):
        return None
    from kernel.blas import load_blas
    from kernel.errors import KernelError

    try:
        load_blas()
        from kernel.weights import load_tokenizer

        tokenizer, digest = load_tokenizer(path)
    except KernelError as error:
        if given:
            raise Unusable(f"the tokenizer cannot be loaded: {error}") from error
        return None
    known = header.digests.get("tokenizer", digest)
    if digest == known:
        return tokenizer
    if not given:
        return None
    tell(f"note: {given} is not the very tokenizer of the tape's model: texts may differ for that")
    return tokenizer


def _at_hand(model: str) -> bool:
    """Whether a tape's model is here, so that nothing would be fetched."""
    from kernel.bundled import BUNDLED, cache_folder

    if model in BUNDLED:
        return (cache_folder() / "models" / BUNDLED[model].file).is_file()
    return Path(model).expanduser().exists()


def speed(text: str) -> float | None:
    """A factor above 0, or max: at once, for argparse."""
    if text == MAX:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"must be a number above 0, or max, not {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay serve-load",
        description="Send the requests of a tape to an OpenAI-compatible server, when they came, "
        "and compare its answers and their times with those on tape.",
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument("url", metavar="URL", help="the server, like http://127.0.0.1:8000")
    parser.add_argument(
        "--speed",
        type=speed,
        default=1.0,
        metavar="X",
        help="times as fast as recorded (default: 1); max: at once",
    )
    parser.add_argument(
        "--concurrency",
        type=number,
        default=256,
        metavar="N",
        help="requests in flight at most (default: 256)",
    )
    parser.add_argument("--no-cancels", action="store_true", help="let nobody leave before the end")
    parser.add_argument("--model", default="", metavar="NAME", help="default: the server's first")
    parser.add_argument(
        "--api-key", default=None, metavar="KEY", help="default: OPENAI_API_KEY, where it is set"
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="to compare texts (default: that of the tape's model, where it is at hand)",
    )
    parser.add_argument(
        "--detokenize",
        default="",
        metavar="FOLDER",
        help="send prompts as text of this tokenizer, not as token ids",
    )
    parser.add_argument(
        "--openai-only", action="store_true", help="send no field that OpenAI's API does not have"
    )
    parser.add_argument(
        "--timeout",
        type=number,
        default=600,
        metavar="SECONDS",
        help="the longest silence of the server (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """`replay serve-load`."""
    given = _parser().parse_args(arguments)
    if not given.concurrency or not given.timeout:
        raise Unusable("--concurrency and --timeout must be at least 1")
    key = os.environ.get("OPENAI_API_KEY", "") if given.api_key is None else given.api_key
    if key and not is_key(key):
        raise Unusable("an API key is printable ASCII without spaces: give another one")
    target = Target(given.url, key, given.model, given.timeout)
    if given.tape == STDIN:
        keep_stdin()
    options = Options(
        model=given.model,
        speed=given.speed,
        concurrency=given.concurrency,
        cancels=not given.no_cancels,
        openai_only=given.openai_only,
        tokenizer=find_tokenizer(read_header(given.tape), given.detokenize or given.tokenizer),
        as_text=bool(given.detokenize),
    )
    report = serve_load(given.tape, target, options)
    text = msgspec.json.encode(report).decode() if given.json else as_text(report)
    sys.stdout.write(text + "\n")
    return report.exit_code
