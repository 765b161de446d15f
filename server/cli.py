"""Command line: `mlxtape serve`, `generate`, `chat`, `score`, `bench` and `families`.

Owns arguments, exit codes (0 done, 1 failed, 2 wrong usage, 130 interrupted) and what a person
reads. A refusal is one sentence on the error stream, never a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, ClassVar, NoReturn

import attrs

from kernel.errors import KernelError
from kernel.tokenizer import Tokenizer

from . import families_command, garbage, terminal
from .adapters import named_path
from .api import Engine, RunningEngine
from .arguments import check_arguments
from .capture import CaptureError
from .http.app import create_app
from .http.auth import keys_of
from .http.listen import ListenError, bind, check_tls, listen, run
from .http.wire import ApiError
from .http.wire_chat import ChatRequest, Message, check_chat
from .logs import configure_logs
from .print_config import config_text
from .settings import Settings, SettingsError, load_with_sources
from .submission import EngineStopped, RequestRefused
from .terminal import CommandFailed

EXPECTED = (KernelError, CaptureError, ListenError, CommandFailed, EngineStopped, RequestRefused)
SERVING_ONLY = (
    *("host", "port", "max_waiting", "max_body_bytes", "max_header_bytes", "body_timeout_s"),
    *("request_timeout_s", "keep_alive_s", "grace_s", "api_key", "api_key_file", "public_metrics"),
    *("cors_origins", "tls_cert", "tls_key", "adapter_loading"),
)
"""Settings that mean nothing where nothing is served."""


Build = Callable[[Settings, Callable[[str], None]], tuple[RunningEngine, Tokenizer]]


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """The exit code. `build` makes the engine (tests give another one)."""
    try:
        given = sys.argv[1:] if argv is None else argv
        _check(given)
        arguments = vars(_parser().parse_args(given))
        command = arguments.pop("command")
        if command == "families":
            return families_command.main(arguments.get("model"), arguments["json"])
        own = {name: arguments.pop(name) for name in OWN if name in arguments}
        settings, sources = load_with_sources(arguments, os.environ, own.pop("config", None))
        if own.pop("print_config", False):
            print(config_text(settings, sources), end="")
            return 0
        if command == "serve":
            return _serve(settings, build or _build)
        return _in_process(command, settings, build or _build, own)
    except (SettingsError, ApiError) as error:
        return _fail(error, 2)
    except EXPECTED as error:
        return _fail(error, 1)
    except BrokenPipeError:
        # Who read the output has gone; Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _check(arguments: Sequence[str]) -> None:
    try:
        check_arguments(arguments)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _fail(error: Exception, code: int) -> int:
    print(f"mlxtape: {error}", file=sys.stderr)
    return code


def _build(settings: Settings, progress: Callable[[str], None]) -> tuple[RunningEngine, Tokenizer]:
    # Here, not above: it loads MLX, which `--help` and a wrong flag need not wait for.
    from .build import build_engine

    return build_engine(settings, progress)


def _serve(settings: Settings, build: Build) -> int:
    configure_logs(settings.log_level, settings.log_format)
    # First what can be wrong with the address, the keys and TLS: a model takes its time to load.
    check_tls(settings)
    keys_of(settings)
    listener = bind(settings.host, settings.port)
    try:
        engine, tokenizer = build(settings, _tell)
        try:
            app = create_app(engine, tokenizer, settings.model, settings)
            garbage.settle()
            host, port = listen(listener)
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if settings.tls_cert is None else "https"
            print(f"serving {settings.model} on {scheme}://{shown}:{port}", flush=True)
            left = run(app, listener, settings)
        finally:
            engine.stop()
    finally:
        listener.close()
    if left:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the tape has ended, and nobody waits for what is still being made
    return 0


def _in_process(command: str, settings: Settings, build: Build, own: dict[str, Any]) -> int:
    """A command that needs no address: it ends with its answer."""
    level = "warning" if settings.log_level == "info" else settings.log_level
    configure_logs(level, settings.log_format)
    sampling = ("max_tokens", "temperature", "seed")
    asked: dict[str, Any] = {name: own.pop(name) for name in sampling if name in own}
    if command in ("generate", "chat"):
        check_chat(ChatRequest(messages=[Message("user", "")], **asked))
    with Engine(*build(settings, _tell), settings) as engine:
        if settings.adapter:  # of several the first
            asked["model"], _ = named_path(settings.adapter[0])
        if command == "generate":
            terminal.generate(engine, own["prompt"], asked)
        elif command == "chat":
            terminal.chat(engine, own.get("system"), asked)
        elif command == "score":
            as_json = own.get("json", False)
            terminal.score(engine, own["prompt"], own["continuations"], as_json, **asked)
        else:
            as_json = own.pop("json", False)
            terminal.print_bench(terminal.bench(engine, **_BENCH | own | asked), as_json)
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """One sentence for a wrong usage, and a pointer to the rest."""

    flags: ClassVar[set[str]] = set()
    """Names of all commands' flags: the parser at the top reports what a command does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --([^ =]+)", message)
        name = unknown[1] if unknown else ""
        near = difflib.get_close_matches(name, self.flags, n=1)
        # Another command's flag is near to itself: no hint then.
        hint = f"; do you mean --{near[0]}?" if near and near != [name] else ""
        self.exit(2, f"mlxtape: {message}{hint} (see {self.prog} --help)\n")


OWN = (
    *("config", "print_config", "prompt", "max_tokens", "temperature", "seed", "system"),
    *("continuations", "json", "requests", "concurrency", "prompt_tokens"),
)
"""Arguments that are no settings."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mlxtape",
        description="An LLM inference server whose KV cache keeps a tape that can be replayed.",
        allow_abbrev=False,
    )
    version = f"mlxtape {metadata.version('mlxtape')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", "serve a model over HTTP, as OpenAI's API", ())
    serve.add_argument(
        "--print-config", action="store_true", help="print all settings as TOML, and end"
    )
    one = _add_command(commands, "generate", "print the answer to one message", SERVING_ONLY)
    one.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="the message")
    talk = _add_command(commands, "chat", "talk with a model on the terminal", SERVING_ONLY)
    talk.add_argument("--system", metavar="TEXT", help="the conversation's system message")
    for command in (one, talk):
        _add_sampling(command)
    _add_score(_add_command(commands, "score", "log-likelihoods of continuations", SERVING_ONLY))
    _add_bench(_add_command(commands, "bench", "measure a model on this machine", SERVING_ONLY))
    text = "how architectures, or a model, are served, and what they can do"
    families = commands.add_parser("families", help=text, description=f"Tell {text}.")
    families.add_argument("--model", metavar="PATH", help="load this one and find out")
    families.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_sampling(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--max-tokens", type=int, metavar="N", help="tokens of the answer at most")
    add("--temperature", type=float, metavar="T", help="0 to 2 (default 0: greedy)")
    add("--seed", type=int, metavar="N", help="random by default")


def _add_score(command: argparse.ArgumentParser) -> None:
    command.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="what stands before")
    command.add_argument("continuations", nargs="+", metavar="TEXT", help="what may follow it")
    command.add_argument("--json", action="store_true", help="print JSON")


_BENCH = {"requests": 16, "concurrency": 4, "prompt_tokens": 128, "max_tokens": 64}


def _add_bench(command: argparse.ArgumentParser) -> None:
    texts = {
        "requests": "requests in all",
        "concurrency": "requests at a time",
        "prompt_tokens": "tokens of each prompt",
        "max_tokens": "tokens of each answer",
    }
    for name, text in texts.items():
        flag = "--" + name.replace("_", "-")
        shown = f"{text} (default {_BENCH[name]})"
        command.add_argument(flag, type=_count, metavar="N", help=shown)
    command.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _add_command(
    commands: Any, name: str, text: str, leave_out: Sequence[str]
) -> argparse.ArgumentParser:
    """A command with a flag for each setting, and --config."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command.add_argument("--config", metavar="FILE", help="TOML file of settings")
    pool = command.add_mutually_exclusive_group()
    for field in attrs.fields(Settings):
        if field.name not in leave_out:
            to = pool if field.name in ("num_blocks", "kv_memory") else command
            _add_flag(to, field)
    return command


_METAVARS = {
    "model": "PATH",
    "host": "ADDRESS",
    "capture": "PATH",
    "draft_model": "PATH",
    "adapter": "NAME=FOLDER",
    "kv_memory": "SIZE",
    "max_body_bytes": "SIZE",
    "max_header_bytes": "SIZE",
    "scheduling": "ORDER",
    "sanitize": "MODE",
    "on_divergence": "MODE",
    "api_key": "KEY,...",
    "api_key_file": "PATH",
    "cors_origins": "ORIGIN,...",
    "tls_cert": "PATH",
    "tls_key": "PATH",
    "log_level": "LEVEL",
    "log_format": "FORMAT",
}


def _add_flag(command: Any, field: attrs.Attribute[Any]) -> None:
    name = field.name.replace("_", "-")
    _Parser.flags.add(name)
    flag = f"--{name}"
    text = field.metadata["help"]
    if isinstance(field.default, bool):
        text += f" (default {'on' if field.default else 'off'})"
        command.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = _METAVARS.get(field.name, "N")
    if isinstance(field.default, tuple):
        command.add_argument(flag, action="append", metavar=metavar, help=text)
        return
    if field.default is not None:
        text += f" (default {field.default})"
    command.add_argument(flag, metavar=metavar, help=text)


if __name__ == "__main__":
    sys.exit(main())
