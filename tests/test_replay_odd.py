"""What people give `replay` by mistake: one sentence and exit code 2, and no tape is harmed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import zstandard

from replay.cli import main
from replay.reader import Tape
from replay.run import CLEAN, TORN, UNUSABLE
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Header, TapeEnded

from .tapes.golden import PATH as GOLDEN

DIVERGED = GOLDEN.with_name("s1.tape")
BROKEN_PIPE = 141


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    """A tape that may be harmed."""
    copy = tmp_path / "capture.log"
    copy.write_bytes(GOLDEN.read_bytes())
    return copy


@pytest.fixture
def idle(tmp_path: Path) -> str:
    """The tape of a server that nobody asked anything."""
    begun = [it for it in Tape(str(GOLDEN)) if isinstance(it, Header | Checkpoint)]
    path = tmp_path / "idle.log"
    path.write_bytes(TapeEncoder().encode([*begun, TapeEnded(0)]))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which a command is refused."""
    assert main(list(arguments)) == UNUSABLE
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    return shown.err


def process(*arguments: str, out: int) -> tuple[int, str]:
    """Exit code and error stream of `replay`, whose output goes to a file descriptor."""
    environment = {name: it for name, it in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "replay.cli", *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return done.returncode, done.stderr


def test_a_command_is_one_in_a_folder_that_holds_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stat").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["stat", str(GOLDEN)]) == 0
    assert capsys.readouterr().out.startswith("10 requests, 36 steps")


def test_a_server_that_nobody_asked_adds_up_to_nothing(
    idle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stat", idle]) == 0
    assert capsys.readouterr().out.startswith("0 requests, 0 steps, 0 rows; no step failed\n")
    assert main(["what-if", idle, "--set", "max_running=2"]) == 0
    assert "0 steps instead of 0" in capsys.readouterr().out


def test_settings_under_which_nothing_fits_are_a_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["what-if", str(GOLDEN), "--set", "num_blocks=1"]) == 0
    assert "num_blocks=1 (was 24): 0 steps instead of 36" in capsys.readouterr().out


def test_a_step_of_a_tape_without_steps_is_refused_as_such(
    idle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "show", idle, "--at", "1") == f"replay: {idle} has no step at all\n"
    assert "has no step at all" in refused(capsys, idle, "--from", "1")


@pytest.mark.parametrize("name", ["", "a" * 5000])
def test_a_path_that_cannot_be_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["stat"], ["bisect"], ["follow", "--idle", "0"]):
        assert refused(capsys, *command, name).startswith("replay: ")


def test_a_segment_that_is_gone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000001-000000.tape").symlink_to(tmp_path / "nowhere")
    for command in ([], ["stat"], ["show", "--at", "1"]):
        assert "000001-000000.tape" in refused(capsys, *command, str(tmp_path))


def test_a_folder_that_may_not_be_read_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000001-000000.tape").write_bytes(GOLDEN.read_bytes())

    def denied(folder: object = ".") -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    # Root may read all folders, so that a mode would not do.
    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)
    for command in ([], ["stat"], ["follow", "--idle", "0"]):
        said = refused(capsys, *command, str(tmp_path))
        assert said == f"replay: {tmp_path}: Permission denied\n"


def test_a_folder_in_the_place_of_a_segment_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000001-000000.tape").mkdir()
    for command in (["follow", "--idle", "0"], ["repair", "-o", str(tmp_path / "new.log")]):
        assert "000001-000000.tape" in refused(capsys, *command, str(tmp_path))


def test_a_segment_that_is_compressed_while_a_tape_is_read_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    """Its server closes it while those before it are read, which may take minutes."""
    segment = tmp_path / "000001-000000.tape"
    segment.write_bytes(GOLDEN.read_bytes())
    tape = Tape(str(tmp_path))
    packed = segment.with_name(segment.name + ".zst")
    packed.write_bytes(zstandard.ZstdCompressor().compress(segment.read_bytes()))
    segment.unlink()
    assert list(tape) == list(Tape(str(GOLDEN)))


def test_a_pipe_that_was_read_already_is_not_called_too_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `replay show <(zstdcat capture.log.zst) --at -1` would have it."""
    read, write = os.pipe()
    pipe = f"/dev/fd/{read}"
    try:
        os.write(write, GOLDEN.read_bytes())
        os.close(write)
        said = refused(capsys, "show", pipe, "--at", "-1")
    finally:
        os.close(read)
    assert said.startswith(f"replay: nothing is left to read in the pipe {pipe}: where a tape is ")


@pytest.mark.parametrize("command", ["export --to jsonl", "html", "minimize"])
@pytest.mark.parametrize("where", ["capture.log", "link.log", "captures/000001-000000.tape"])
def test_no_output_takes_the_place_of_the_tape(
    command: str, where: str, tape: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape.write_bytes(DIVERGED.read_bytes())
    (tape.parent / "captures").mkdir()
    (tape.parent / "captures" / "000001-000000.tape").write_bytes(tape.read_bytes())
    (tape.parent / "link.log").symlink_to(tape)
    output = tape.parent / where
    given = str(output.parent if "/" in where else tape)
    said = refused(capsys, *command.split(), given, "-o", str(output))
    assert "is the tape itself" in said
    assert output.read_bytes() == DIVERGED.read_bytes()


@pytest.mark.parametrize("command", ["export --to jsonl", "html", "minimize"])
def test_an_output_that_is_no_file_stays_what_it_is(command: str, tmp_path: Path) -> None:
    """A device that is replaced by a file is gone until the machine starts again."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        code = main([*command.split(), str(DIVERGED), "-o", str(pipe)])
    assert main([*command.split(), str(DIVERGED), "-o", str(file)]) == code
    assert read.result() == file.read_bytes()
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", ["export --to jsonl", "html", "minimize", "repair", "upgrade"])
def test_an_output_without_a_name_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, *command.split(), str(DIVERGED), "-o", "")


def test_an_alert_that_is_no_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "follow", str(GOLDEN), "--alert", "notify 'them")
    assert said == 'replay: --alert "notify \'them" cannot be read: No closing quotation\n'


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1"])
def test_an_address_that_cannot_be_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve-load", str(GOLDEN), url)
    assert said == f"replay: {url} is no server's address: write it as http://HOST:PORT\n"


@pytest.mark.parametrize("command", [[], ["stat"]])
def test_output_that_nobody_reads_any_more_is_no_verdict(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert process(*command, str(DIVERGED), out=write) == (BROKEN_PIPE, "")
    finally:
        os.close(write)


def test_without_a_standard_output_the_exit_code_is_the_answer() -> None:
    program = "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"
    closed = [sys.executable, "-c", program]
    for arguments, code, said in (
        ([str(GOLDEN)], 0, ""),
        ([str(DIVERGED)], 1, ""),
        (
            ["export", str(GOLDEN), "--to", "jsonl", "-o", "-"],
            UNUSABLE,
            "replay: standard output is closed: give -o the name of a file\n",
        ),
    ):
        command = [*closed, sys.executable, "-m", "replay.cli", *arguments]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (code, said)


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        code, said = process("stat", str(GOLDEN), out=full.fileno())
    assert code == UNUSABLE
    assert said == "replay: No space left on device\n"


@pytest.mark.parametrize("command", ["repair", "redact", "upgrade", "minimize"])
def test_no_new_tape_is_put_among_the_segments_of_the_one_it_is_made_of(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "000001-00000.tape").write_bytes(GOLDEN.read_bytes())
    new = tmp_path / "new.tape"
    said = refused(capsys, command, str(tmp_path), "-o", str(new))
    assert f"{new} would be read as a part of {tmp_path}: give it another place" in said
    assert not new.exists()


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_the_exit_code_is_right_where_the_error_stream_cannot_be_written(
    closed: str, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.log"
    cut.write_bytes(GOLDEN.read_bytes()[:-3])
    nothing = tmp_path / "nothing"
    command = f"{sys.executable} -m replay.cli"
    for asked, code in (
        (f"{GOLDEN}", CLEAN),
        (f"{cut}", TORN),
        (f"{nothing}", UNUSABLE),
        ("- <&-", UNUSABLE),
    ):
        shell = ["bash", "-c", f"{command} {asked} {closed}"]
        done = subprocess.run(shell, stdout=subprocess.PIPE, check=False)
        assert done.returncode == code, (asked, done.stdout)
