"""Settings and the command line: sources, their order, refusals, exit codes."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel.errors import ModelError
from kernel.tokenizer import Tokenizer
from server.cli import main
from server.settings import Settings, SettingsError, load_settings
from server.values import Size, Texts

from .fake_engine import END, FakeEngine, byte_tokenizer


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mlxtape.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_those_that_the_help_names() -> None:
    settings = load_settings({}, {})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8080, "smollm2-135m")
    assert (settings.max_body_bytes, settings.prefix_cache) == (8 * 2**20, True)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    config = toml(tmp_path, "port = 1\nmax_running = 2\nprefill_chunk = 3\nprefix_cache = false")
    environment = {"MLXTAPE_MAX_RUNNING": "20", "MLXTAPE_PREFILL_CHUNK": "30", "OTHER": "1"}
    settings = load_settings({"prefill_chunk": "300"}, environment, config)
    assert (settings.port, settings.max_running, settings.prefill_chunk) == (1, 20, 300)
    assert settings.prefix_cache is False


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    environment = {"MLXTAPE_CONFIG": toml(tmp_path, "port = 7"), "MLXTAPE_CACHE": "/x"}
    environment["MLXTAPE_BLAS"] = "openblas"
    assert load_settings({}, environment).port == 7


def test_a_later_choice_of_the_pools_size_replaces_the_earlier_one(tmp_path: Path) -> None:
    config = toml(tmp_path, 'kv_memory = "2GiB"')
    assert load_settings({}, {}, config).kv_memory == 2 * 2**30
    settings = load_settings({"num_blocks": "9"}, {}, config)
    assert (settings.num_blocks, settings.kv_memory) == (9, None)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("2GiB", 2**31), ("2G", 2**31), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("77", 77)],
)
def test_sizes_take_units(text: str, size_bytes: int) -> None:
    assert load_settings({"kv_memory": text}, {}).kv_memory == size_bytes


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prot = 1", r"there is no setting 'prot' \(in .*mlxtape.toml\); do you mean port\?"),
        ("port = '80a'", r"port must be a whole number, not '80a' \(in .*\)"),
        ("port = 1.5", "port must be a whole number, not 1.5"),
        ("port = true", "port must be a whole number, not True"),
        ("port = 70000", "port must be between 0 and 65535, not 70000"),
        ("block_size = 0", "block_size must be at least 1, not 0"),
        ("prefix_cache = 1", "prefix_cache must be true or false, not 1"),
        ("model = 3", "model must be a text that is not empty, not 3"),
        ("sanitize = 'all'", "sanitize must be edges, full or off, not all"),
        ("kv_memory = '2 lots'", "kv_memory must be a size such as 512MiB or 2GiB, not '2 lots'"),
        ("grace_s = 'x'", "grace_s must be a number, not 'x'"),
        ("num_blocks = 1\nkv_memory = 1", "num_blocks and kv_memory are both given"),
        ("max_batch_tokens = 4", r"max_running \(32\) must not exceed max_batch_tokens \(4\)"),
        ("port = ", "mlxtape.toml is not valid TOML"),
        ("gracee_s = 1", r"no setting 'gracee_s' \(in .*\); do you mean grace_s\?"),
        ("zzz = 1", r"no setting 'zzz' \(in .*\); known are model, host, port,"),
        ("max_waiting = 0", "max_waiting must be at least 1, not 0"),
        ("max_header_bytes = 1000", "max_header_bytes must be between 1KiB and 16MiB, not 1000"),
        ("request_timeout_s = -1", "request_timeout_s must be between 0 and 86400, not -1"),
        ("body_timeout_s = 0", "body_timeout_s must be between 1 and 86400, not 0"),
        ("keep_alive_s = nan", "keep_alive_s must be between 1 and 86400, not nan"),
        ("log_format = 'xml'", "log_format must be text or json, not xml"),
        ("tls_cert = 'x'", "tls_cert and tls_key belong together"),
        ("cors_origins = ['http://a/']", r"cors_origins must be \* or .* not 'http://a/'"),
        ("cors_origins = [3]", r"cors_origins must be a list of texts, not \[3\]"),
        ("api_key = ' , '", r"api_key must not be empty: leave it out, or give a text \(in .*\)$"),
        (
            "cors_origins = ['']",
            r"cors_origins must not be empty: leave it out, or give a text, not",
        ),
        ("api_key = 3", r"api_key must be a list of texts \(in .*\)$"),
        ("api_key = ['a b']", "^api_key must be printable ASCII without spaces$"),
        ("api_key = '***'", r"api_key is masked as \*\*\* \(in .*\): give it in the environment"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(
    tmp_path: Path, content: str, sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_settings({}, {}, toml(tmp_path, content))


def test_an_unknown_variable_of_ours_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'prot' \(in the environment\)"):
        load_settings({}, {"MLXTAPE_PROT": "1"})


def test_the_policy_is_the_settings(tmp_path: Path) -> None:
    config = toml(tmp_path, "max_running = 3\nprefill_tile = 32\nprefill_cohort = true")
    policy = load_settings({}, {}, config).policy(context_tokens=77)
    assert (policy.max_running, policy.prefill_tile, policy.prefill_cohort) == (3, 32, True)
    assert policy.context_tokens == 77


@pytest.mark.parametrize(
    "load",
    [
        lambda file: load_settings({}, {}, file("api_key = ['a', 'b']")),
        lambda file: load_settings({}, {}, file("api_key = 'a, b,'")),
        lambda file: load_settings({}, {"MLXTAPE_API_KEY": "a,b"}, file("api_key = 'c'")),
        lambda _: load_settings({"api_key": ["a", "b"]}, {}),
        lambda _: load_settings({"api_key": ["a,b"]}, {"MLXTAPE_API_KEY": "c"}),
    ],
)
def test_a_list_is_a_list_or_a_text_with_commas_or_a_flag_given_twice(
    tmp_path: Path, load: Callable[[Callable[[str], str]], Settings]
) -> None:
    settings = load(lambda text: toml(tmp_path, text))
    assert settings.api_key == ("a", "b")
    assert "'a'" not in repr(settings)


# The command line

Builder = Callable[..., tuple[FakeEngine, Tokenizer]]


class Started(FakeEngine):
    """A fake engine as `build` returns it; remembers that it was stopped."""

    stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.__exit__()


def answering(text: str, engines: list[Started]) -> Builder:
    def build(settings: Settings, progress: object) -> tuple[Started, Tokenizer]:
        tokenizer = byte_tokenizer()
        engine = Started(tokenizer, lambda _: tokenizer.encode(text + END))
        engine.__enter__()
        engines.append(engine)
        return engine, tokenizer

    return build


def never(*_: object) -> tuple[Started, Tokenizer]:
    raise AssertionError("the engine was built")


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["serve", "--print-config", *argv], never) == 0
    return capsys.readouterr().out


def test_printed_settings_are_toml_that_gives_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--capture", 'a"b\\c\x7fé', "--cors-origins", "https://a,http://b:1", "--port", "9"]
    text = printed(capsys, "--kv-memory", "2GiB", "--no-lookahead", *flags)
    given = load_settings({}, {}, toml(tmp_path, text))
    assert given == Settings(
        capture='a"b\\c\x7fé', cors_origins=Texts(("https://a", "http://b:1")), port=9,
        kv_memory=Size(2**31), lookahead=False,
    )  # fmt: skip
    named = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(named) > 30
    again = printed(capsys, "--config", toml(tmp_path, text))
    assert again.count("  # in ") == len(named)


def test_each_printed_setting_names_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toml(tmp_path, "port = 1\nnum_blocks = 3\nmax_running = 4")
    monkeypatch.setenv("MLXTAPE_MAX_RUNNING", "5")
    lines = printed(capsys, "--config", config, "--kv-memory", "1GiB").splitlines()
    assert f"port = 1  # in {config}" in lines
    assert "max_running = 5  # in the environment" in lines
    assert "kv_memory = 1073741824  # among the flags" in lines
    assert "# num_blocks: none  # default" in lines
    assert "block_size = 16  # default" in lines


def test_printed_keys_are_masked_and_never_become_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXTAPE_API_KEY", "sk-one,sk-two")
    text = printed(capsys)
    assert 'api_key = ["***", "***"]  # in the environment\n' in text
    assert "sk-" not in text
    again = toml(tmp_path, text)
    assert load_settings({}, {"MLXTAPE_API_KEY": "sk-3"}, again).api_key == ("sk-3",)
    with pytest.raises(SettingsError, match=r"api_key is masked"):
        load_settings({}, {}, again)


def test_generate_prints_the_answer_and_stops_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines: list[Started] = []
    assert main(["generate", "-p", "hi"], answering("all of it é", engines)) == 0
    assert capsys.readouterr().out == "all of it é\n"
    assert [engine.stopped for engine in engines] == [True]
    parameters = engines[0].next_request().submission.parameters
    assert parameters.temperature == 0.0


def test_generate_hands_its_flags_to_the_request() -> None:
    engines: list[Started] = []
    flags = ["--max-tokens", "2", "--temperature", "0.5", "--seed", "7"]
    assert main(["generate", "-p", "hi", *flags], answering("abc", engines)) == 0
    parameters = engines[0].next_request().submission.parameters
    assert (parameters.max_tokens, parameters.temperature, parameters.seed) == (2, 0.5, 7)


def test_generate_fails_with_a_sentence_where_the_engine_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(settings: Settings, progress: object) -> tuple[Started, Tokenizer]:
        tokenizer = byte_tokenizer()
        engine = Started(tokenizer, lambda _: tokenizer.encode("ab"))
        engine.__enter__()
        return engine, tokenizer

    assert main(["generate", "-p", "hi"], build) == 1
    assert capsys.readouterr().err == "mlxtape: the script ended\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["serve", "--bogus"], "unrecognized arguments: --bogus (see"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1; do you mean --port?"),
        (["generate", "-p", "x", "--port", "1"], "unrecognized arguments: --port 1 (see"),
        (["serve", "--port", "abc"], "port must be a whole number"),
        (["serve", "--num-blocks", "1", "--kv-memory", "1G"], "not allowed with argument"),
        (["serve", "--config", "/no/such"], "/no/such cannot be read: No such file"),
        (["generate"], "required: -p/--prompt"),
        (["generate", "-p", "x", "--temperature", "3"], "temperature is 3.0; it must be between"),
        (["generate", "-p", "x", "--max-tokens", "-1"], "max_tokens is -1; it must be between"),
    ],
)
def test_a_wrong_usage_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(argv, never)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    errors = capsys.readouterr().err
    assert re.fullmatch(rf"mlxtape: .*{re.escape(sentence)}.*\n", errors), errors


def test_a_port_in_use_is_one_sentence_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)], never) == 1
    assert capsys.readouterr().err == (
        f"mlxtape: port {port} on 127.0.0.1 is in use: "
        "stop what listens there, or choose another --port\n"
    )


def test_a_model_that_cannot_be_loaded_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def build(settings: Settings, progress: object) -> tuple[Started, Tokenizer]:
        raise ModelError("the model path /x does not exist")

    assert main(["serve", "--port", "0"], build) == 1
    assert capsys.readouterr().err == "mlxtape: the model path /x does not exist\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"mlxtape \d+\.\d+\.\d+\n", capsys.readouterr().out)
