"""The command line as a person meets it: processes, signals, refusals, and tapes that are cut."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from replay.cli import main as replay_command
from replay.reader import Tape
from server.cli import main
from statemachine.records import TapeEnded

from .http_server import WAIT_S
from .real_server import CONTEXT, tiny_folder
from .tiny_models import (
    gguf_metadata,
    gguf_tensors,
    tiny_config,
    tiny_weights,
    write_gguf,
)

START_S = 120.0
"""A process that imports MLX on a busy machine takes its time."""
FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
CLEAN, TORN = 0, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def command(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`mlxtape ARGUMENTS` as a process of its own; no setting comes from this environment."""
    environment = {name: text for name, text in os.environ.items() if not _is_setting(name)}
    return subprocess.Popen(
        [sys.executable, "-m", "server.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment | options.pop("env", {}),
        # Whoever runs these tests in the background has interrupts ignored, and so have children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def _is_setting(name: str) -> bool:
    return name.startswith("MLXTAPE_") and name != "MLXTAPE_CACHE"


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and both streams, once it ended."""
    with process:
        out, err = process.communicate(timeout=START_S)
    return process.returncode, out, err


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """What `mlxtape ARGUMENTS`, run in this process, says last: one sentence and nothing else."""
    capsys.readouterr()
    try:
        found: object = main([str(one) for one in arguments])
    except SystemExit as left:  # argparse leaves so
        found = left.code
    assert found == code
    return sentence(*capsys.readouterr())


def sentence(out: str, err: str) -> str:
    """The refusal on the error stream; nothing stands on the other, and no traceback anywhere."""
    assert out == ""
    *progress, last = err.splitlines()
    assert all(re.match(r"(loading|making|attention) ", line) for line in progress), err
    assert last.startswith("mlxtape: "), err
    return last.removeprefix("mlxtape: ")


# What is asked wrongly


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prefill-tile", "0"], "prefill_tile must be at least 1, not 0"),
        (["--prefill-tile", "x"], "prefill_tile must be a whole number, not 'x' (among the flags)"),
        (["--num-blocks", "0"], "num_blocks must be at least 1, not 0"),
        (["--sanitize", "some"], "sanitize must be edges, full or off, not some"),
        (["--log-level", "x"], "log_level must be debug, info, warning or error, not x"),
        (["--port", "70000"], "port must be between 0 and 65535, not 70000"),
        (["--kv-memory", "lots"], "kv_memory must be a size such as 512MiB or 2GiB, not 'lots'"),
        (["--num-blocks", "4", "--kv-memory", "1GiB"], "argument --kv-memory: not allowed with"),
        (["--speed", "9"], "unrecognized arguments: --speed 9 (see mlxtape --help)"),
        (["--config", "none.toml"], "none.toml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_told_in_one_sentence(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, WRONG_USAGE, "serve", *flags).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_runing = 3", "there is no setting 'max_runing' (in FILE); do you mean max_running?"),
        ('max_running = "many"', "max_running must be a whole number, not 'many' (in FILE)"),
        ("max_running =", "FILE is not valid TOML: "),
        ("num_blocks = 4\nkv_memory = 9", "num_blocks and kv_memory are both given (in FILE)"),
    ],
)
def test_a_wrong_file_of_settings_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    last = refusal(capsys, WRONG_USAGE, "serve", "--config", file)
    assert last.startswith(said.replace("FILE", str(file)))


def test_a_process_refuses_unknown_variables_with_one_sentence_and_code_2() -> None:
    code, out, err = outcome(command("serve", env={"MLXTAPE_MAX_RUNING": "3"}))
    assert code == WRONG_USAGE
    assert sentence(out, err).startswith("there is no setting 'max_runing' (in the environment)")


def test_help_and_version_leave_mlx_alone() -> None:
    code, out, err = outcome(command("serve", "--help", env={"PYTHONPROFILEIMPORTTIME": "1"}))
    assert (code, "usage: mlxtape serve" in out) == (0, True)
    assert "starlette" in err
    assert "mlx.core" not in err
    code, out, _ = outcome(command("--version"))
    assert (code, out.split()[0]) == (0, "mlxtape")


def test_a_port_in_use_is_told_before_any_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        last = refusal(capsys, FAILED, "serve", "--port", port, "--model", "does-not-exist")
    assert last == (
        f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose another --port"
    )


# What cannot be loaded


def generate(*arguments: object) -> list[object]:
    return ["generate", "-p", "hi", "--max-tokens", 2, "--num-blocks", 64, *arguments]


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _no_layers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))


def _other_family(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt-0"}))


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def _cut_weights(model: Path) -> None:
    os.truncate(model / "model.safetensors", 50_000)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_weights, r"holds no model\*.safetensors: convert the model"),
        (_no_layers, r"config.json lacks num_hidden_layers: fetch the file again"),
        (_other_family, r"'gpt-0' is no architecture that mlx-lm has: choose another model"),
        (_no_config, r"holds no config.json: give a model's folder"),
        (_no_tokenizer, r"holds no tokenizer.json: fetch it from where"),
        (_cut_weights, r"model.safetensors is damaged \(.*\): fetch it again"),
    ],
)
def test_a_folder_that_is_no_model_is_told_with_what_to_do(
    damage: Callable[[Path], None],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_folder(tmp_path / "model")
    damage(model)
    assert re.search(said, refusal(capsys, FAILED, *generate("--model", model)))


def test_a_model_path_that_does_not_exist_is_told_with_what_may_be_given() -> None:
    code, out, err = outcome(command(*generate("--model", "nowhere")))
    assert code == FAILED
    assert sentence(out, err) == (
        "the model path nowhere does not exist: give a Hugging Face folder with safetensors, "
        "a .gguf file, or one of smollm2-135m"
    )


def test_a_gguf_of_another_architecture_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    metadata = gguf_metadata(config) | {"general.architecture": "mamba"}
    file = write_gguf(tmp_path / "other.gguf", metadata, gguf_tensors(config, tiny_weights(config)))
    last = refusal(capsys, FAILED, *generate("--model", file))
    assert last.startswith(
        "other.gguf is a GGUF of architecture mamba, and only llama, qwen2, qwen3 are served"
    )


@pytest.mark.parametrize("size", [0, 3, 5_000, 300_000])
def test_a_gguf_that_was_cut_is_told_to_be_fetched_again(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    tensors = gguf_tensors(config, tiny_weights(config))
    file = write_gguf(tmp_path / "cut.gguf", gguf_metadata(config), tensors)
    assert file.stat().st_size > size
    os.truncate(file, size)
    last = refusal(capsys, FAILED, *generate("--model", file))
    assert last.startswith(f"{file} cannot be read as GGUF: ")
    assert last.endswith("; fetch it again")


def test_a_pool_larger_than_the_machine_is_refused_with_both_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "-p", "hi", "--model", folder, "--kv-memory", "900TiB"]
    last = refusal(capsys, WRONG_USAGE, *arguments)
    assert re.fullmatch(
        r"[0-9]+ blocks take 921600\.0 GiB, but there are [0-9.]+ GiB of memory here: "
        r"give fewer with num_blocks or kv_memory",
        last,
    )


def test_a_capture_that_cannot_be_written_is_told_before_any_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    below = tmp_path / "file" / "capture.log"
    last = refusal(capsys, FAILED, *generate("--model", "nowhere", "--capture", below))
    assert last.startswith(f"the capture cannot be written to {below}, so give another path")


def test_a_capture_in_a_folder_that_does_not_exist_makes_it(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tape = tmp_path / "new" / "folder" / "capture.log"
    assert main([str(one) for one in generate("--model", folder, "--capture", tape)]) == 0
    assert replay_command([str(tape), "--depth", "plan"]) == CLEAN


def test_a_prompt_that_never_fits_is_told_with_both_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "-p", "x" * 5000, "--model", folder, "--num-blocks", 512]
    last = refusal(capsys, FAILED, *arguments)
    assert last == (
        f"The prompt has 5019 tokens, but prompt and answer may have {CONTEXT} together; "
        "shorten the messages."
    )


# What is printed, and who ends it


@pytest.mark.model
def test_generate_prints_the_answer_and_nothing_else_into_a_pipe() -> None:
    asked = ["generate", "-p", "What is the capital of France?", "--num-blocks", "64"]
    code, out, err = outcome(command(*asked))
    assert (code, out) == (0, "The capital of France is Paris.\n")
    loading, making, attention = err.splitlines()
    assert loading == "loading smollm2-135m"
    assert making == "making a pool of 64 blocks of 16 tokens, 720 KiB each"
    assert re.fullmatch(r"attention over pages by tables \((amx|avx512|vector)\)", attention)


class FullDisk(io.StringIO):
    """A standard output whose disk has no room."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_answer_that_cannot_be_written_is_told_without_a_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    last = refusal(capsys, FAILED, *generate("--model", folder))
    assert last == "the answer cannot be written: No space left on device"


def test_an_interrupt_ends_generate_quietly_and_its_tape_in_order(
    folder: Path, tmp_path: Path
) -> None:
    tape = tmp_path / "capture.log"
    arguments = ["generate", "-p", "hi", "--model", folder, "--num-blocks", 400, "--capture", tape]
    process = command(*arguments)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    code, out, err = outcome(process)
    assert (code, err.count("\n")) == (INTERRUPTED, 3)
    assert len(out) < CONTEXT - 100
    assert isinstance(list(Tape(str(tape)))[-1], TapeEnded)
    assert replay_command([str(tape), "--depth", "plan"]) == CLEAN


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mlxtape serve` on a free port, and its address; killed if the block leaves it running."""
    process = command("serve", "--port", 0, "--num-blocks", 600, *arguments)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (\S+) on (http://127\.0\.0\.1:[0-9]+)\n", line)
        assert found, line
        yield process, found[2]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=WAIT_S)


@contextmanager
def four_streams(address: str) -> Iterator[list[Iterator[str]]]:
    """Four long answers under way, as lines of their streams."""
    with httpx.Client(timeout=START_S) as client:
        opened, lines = [], []
        for number in range(4):
            messages = [{"role": "user", "content": f"{number}"}]
            body = {"messages": messages, "stream": True, "temperature": 0}
            request = client.build_request("POST", f"{address}/v1/chat/completions", json=body)
            response = client.send(request, stream=True)
            assert response.status_code == 200
            opened.append(response)
            lines.append(response.iter_lines())
            assert next(lines[-1]).startswith("data: ")
        yield lines
        for response in opened:
            response.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_busy_server_that_is_told_to_stop_ends_its_answers_and_its_tape(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    tape = tmp_path / "capture.log"
    with (
        serving("--model", folder, "--capture", tape, "--grace-s", "0.2") as (process, address),
        four_streams(address) as streams,
    ):
        process.send_signal(number)
        for lines in streams:
            rest = list(lines)
            assert "server_stopping" in "".join(rest)
            assert "data: [DONE]" not in rest
        code, out, err = outcome(process)
    assert (code, out) == (0, "")
    assert "event=stopping answers=4 grace_s=0.2\n" in err
    assert err.count("finish=cancelled") == 4
    assert "Traceback" not in err
    assert isinstance(list(Tape(str(tape)))[-1], TapeEnded)
    for depth in ("fold", "plan"):
        assert replay_command([str(tape), "--depth", depth]) == CLEAN


def test_a_busy_server_that_is_killed_leaves_a_tape_that_is_clean_up_to_its_end(
    folder: Path, tmp_path: Path
) -> None:
    tape = tmp_path / "capture.log"
    with (
        serving("--model", folder, "--capture", tape) as (process, address),
        four_streams(address) as streams,
    ):
        for lines in streams:
            for _ in range(40):
                next(lines)
        process.kill()
        assert outcome(process)[0] == -signal.SIGKILL
    for depth in ("fold", "plan"):
        # No end, and a step under way or not: cut, in the middle of a write perhaps, never damaged.
        assert replay_command([str(tape), "--depth", depth]) == TORN


def test_log_lines_in_a_pipe_are_plain_and_one_a_request(folder: Path) -> None:
    with serving("--model", folder) as (process, address):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert httpx.post(f"{address}/v1/chat/completions", json=body, timeout=START_S).is_success
        assert httpx.get(f"{address}/nothing").status_code == 404
        process.send_signal(signal.SIGTERM)
        _, _, err = outcome(process)
    chat, refused = (line for line in err.splitlines() if "event=request" in line)
    assert re.fullmatch(
        r"timestamp=\S+ level=info event=request request_id=(\w+) method=POST "
        r"path=/v1/chat/completions status=200 ms=[0-9]+ id=chatcmpl-\1 request=0 answers=1 "
        r"prompt=21 cached=0 tokens=3 finish=length",
        chat,
    )
    assert re.fullmatch(
        r"timestamp=\S+ level=info event=request request_id=\w+ method=GET path=/nothing "
        r'status=404 ms=[0-9]+ reason="There is no /nothing here\."',
        refused,
    )
    assert "\x1b" not in err
