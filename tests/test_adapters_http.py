"""Adapters over HTTP: chosen by `model`, never sharing rows, coming and going, and replayed."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernel.blas import load_blas

load_blas()

from kernel.adapter_files import read_files, version_of  # noqa: E402
from kernel.errors import AdapterError  # noqa: E402
from replay.cli import main as replay_command  # noqa: E402
from replay.reader import Tape  # noqa: E402
from server.adapters import Key, Shelf  # noqa: E402
from server.api import Engine  # noqa: E402
from server.http.app import create_app  # noqa: E402
from server.http.wire import ApiError  # noqa: E402
from server.settings import Settings, SettingsError, load_settings  # noqa: E402
from server.submission import RequestRefused, Submission  # noqa: E402
from server.values import Texts  # noqa: E402
from statemachine.events import Namespace  # noqa: E402
from statemachine.records import AdapterUsed, Header, Parameters, RequestArrived  # noqa: E402

from .fake_engine import FakeAdapters, scripted  # noqa: E402
from .http_server import WAIT_S, live_server  # noqa: E402
from .lora import write_adapter  # noqa: E402
from .real_server import Served, cached_of, serving, text_of, tiny_folder  # noqa: E402

DEPTHS = ("fold", "plan", "forward", "reference")
KEY = "x"
"""What real_server's client sends."""
LONG = "a prompt that is longer than one block, or than two of them"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny llama ("") and three adapters of it, strong enough for other words."""
    root = tmp_path_factory.mktemp("adapters")
    model = tiny_folder(root / "tiny")
    made = {
        name: write_adapter(root / name, model, seed, scale=6.0) for seed, name in enumerate("abc")
    }
    return {"": model, **made}


def started(folders: dict[str, Path], tape: Path, **settings: Any) -> Any:
    named = Texts(tuple(f"{name}={folders[name]}" for name in "ab"))
    settings = {"num_blocks": 300, "capture": str(tape), "adapter": named} | settings
    return serving(folders[""], api_key=Texts((KEY,)), **settings)


@pytest.fixture(scope="module")
def served(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    tape = tmp_path_factory.mktemp("tapes") / "adapters.log"
    with started(folders, tape, adapter_loading=True) as it:
        yield it, tape


def ask(served: Served, model: str, text: str = LONG, **fields: Any) -> Any:
    return served.ask(text, model=model, **fields)


def post(served: Served, path: str, body: Any, key: str = KEY) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.server.url}{path}", json=body, headers=headers, timeout=WAIT_S)


def load(served: Served, name: str, path: Path | str) -> httpx.Response:
    return post(served, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(served: Served, name: str) -> httpx.Response:
    return post(served, "/v1/unload_lora_adapter", {"lora_name": name})


def replayed(tape: Path, folders: dict[str, Path]) -> list[int]:
    """Exit codes at all depths."""
    model = ["--model", str(folders[""])]
    return [replay_command([str(tape), "--depth", depth, *model]) for depth in DEPTHS]


def test_requests_name_an_adapter_as_their_model_and_share_rows_with_their_own_kind_only(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    with started(folders, tape) as served:
        base = served.model
        alone = {name: ask(served, name) for name in (base, "a", "b")}
        texts = {name: text_of(answer) for name, answer in alone.items()}
        assert len(set(texts.values())) == 3
        assert [cached_of(answer) for answer in alone.values()] == [0, 0, 0]
        assert [answer.model for answer in alone.values()] == [base, "a", "b"]
        with ThreadPoolExecutor(9) as pool:
            names = [base, "a", "b"] * 3
            together = list(pool.map(lambda name: ask(served, name), names))
        assert [text_of(answer) for answer in together] == [texts[name] for name in names]
        assert all(cached_of(answer) > 16 for answer in together)
        listed = served.client.models.list().data
        found = [(it.id, getattr(it, "parent", None)) for it in listed]
        assert found == [(base, None), ("a", base), ("b", base)]
        assert served.client.models.retrieve("b").model_dump()["parent"] == base
        with pytest.raises(
            Exception, match=r"does not exist here; this server has '.*tiny', 'a' and 'b'"
        ):
            ask(served, "c")
        served.idle()
    assert replayed(tape, folders) == [0] * 4
    records = list(Tape(str(tape)))
    head = next(it for it in records if isinstance(it, Header))
    digests = {name: read_files(str(folders[name])).digest for name in "ab"}
    assert head.adapters == tuple(AdapterUsed(n, digests[n], str(folders[n])) for n in "ab")
    spaces = [it.namespace for it in records if isinstance(it, RequestArrived)][:3]
    assert spaces == [Namespace(), *(Namespace(name, version_of(digests[name])) for name in "ab")]


def test_other_weights_under_a_name_are_a_new_version_that_shares_no_rows(
    folders: dict[str, Path], served: tuple[Served, Path]
) -> None:
    it = served[0]
    assert load(it, "new", folders["b"]).text == "Success: LoRA adapter 'new' added successfully."
    before = ask(it, "new")
    assert load(it, "new", folders["c"]).status_code == 200
    after = ask(it, "new")
    assert text_of(after) != text_of(before)
    assert cached_of(after) == 0
    assert load(it, "new", folders["b"]).status_code == 200
    again = ask(it, "new")
    assert text_of(again) == text_of(before)
    assert cached_of(again) > 16


def test_an_adapter_that_is_unloaded_is_gone_for_new_requests_and_stays_for_old_ones(
    folders: dict[str, Path], served: tuple[Served, Path]
) -> None:
    it = served[0]
    assert load(it, "gone", folders["c"]).status_code == 200
    expected = text_of(ask(it, "gone", max_tokens=200))
    stream = ask(it, "gone", max_tokens=200, stream=True)
    parts = [next(iter(stream)).choices[0].delta.content or ""]
    assert unload(it, "gone").text == "Success: LoRA adapter 'gone' removed successfully."
    refused = post(it, "/v1/completions", {"model": "gone", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert it.engine._opened_limits().shelf.retired
    parts += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == expected
    it.until(lambda _: not it.engine._opened_limits().shelf.retired)
    twice = unload(it, "gone")
    assert twice.status_code == 404
    assert twice.json()["error"]["message"] == (
        "There is no adapter 'gone' to unload: GET /v1/models lists those that are loaded."
    )


def test_a_python_program_names_an_adapter_as_its_model(folders: dict[str, Path]) -> None:
    named = [f"a={folders['a']}"]
    with Engine.load(str(folders[""]), num_blocks=100, adapter=named) as engine:
        texts = [
            engine.generate("once", max_tokens=8, temperature=0, **model).text
            for model in ({}, {"model": "a"}, {"model": str(folders[""])})
        ]
        with pytest.raises(ApiError, match="The model 'b' does not exist here"):
            engine.chat("once", model="b")
    assert texts[0] == texts[2] != texts[1]


def test_an_adapter_that_went_while_a_request_came_in_is_a_404_too(
    folders: dict[str, Path], served: tuple[Served, Path]
) -> None:
    engine = served[0].engine
    gone = Namespace("a", 1)
    with pytest.raises(RequestRefused) as error:
        engine.submit(Submission((1, 2), Parameters(1), namespace=gone), lambda _: None)
    assert str(error.value) == (
        "adapter 'a' was unloaded, or loaded anew, while this request came in: send it again"
    )
    with scripted("yes") as fake:
        settings = Settings(grace_s=0.0)
        with live_server(create_app(fake, fake.tokenizer, "m", settings), settings) as server:
            fake.refusal = error.value
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_every_endpoint_takes_an_adapter(served: tuple[Served, Path]) -> None:
    it = served[0]
    turns = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 3},
        "/v1/messages": {"messages": turns, "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/v1/embeddings": {"input": "hi"},
    }
    for path, body in bodies.items():
        answers = [post(it, path, body | {"model": model}) for model in (it.model, "a")]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.json()["model"] for answer in answers] == [it.model, "a"]
        kept = ("data", "choices", "content", "output")
        told = [{k: v for k, v in one.json().items() if k in kept} for one in answers]
        assert told[0] != told[1]


def test_what_cannot_be_loaded_is_refused_in_a_sentence(
    folders: dict[str, Path], served: tuple[Served, Path], tmp_path: Path
) -> None:
    it = served[0]
    missing = load(it, "x", tmp_path / "none")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
    assert missing.json()["error"]["message"].startswith(f"{tmp_path / 'none'}/adapter_config.json")
    for name, said in [
        (it.model, f"An adapter must have another name than the model itself, {it.model!r}."),
        ("", "An adapter must have a name of 1 to 128 printable characters, not ''."),
    ]:
        refused = load(it, name, folders["c"])
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert post(it, path, {"lora_name": "a", "lora_path": "x"}, key="wrong").status_code == 401


def test_adapters_come_and_go_only_where_a_setting_allows_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with started(folders, tmp_path / "tape") as served:
        for answer in (load(served, "c", folders["c"]), unload(served, "a")):
            assert answer.status_code == 403
            assert answer.json()["error"]["message"] == (
                "This server loads no adapters while it runs; start it with --adapter-loading."
            )
        assert list(served.engine.adapters) == ["a", "b"]


def test_a_replay_takes_the_folders_it_is_given_and_refuses_other_weights(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = {"": folders[""], **{n: Path(shutil.copytree(folders[n], tmp_path / n)) for n in "ab"}}
    tape = tmp_path / "tape.log"
    with started(moved, tape, adapter_loading=True) as served:
        ask(served, "a")
        load(served, "late", folders["c"])
        ask(served, "late")
        served.idle()
    shutil.rmtree(moved["a"])

    def forward(*given: str, depth: str = "forward") -> tuple[int, str]:
        model = ("--model", str(folders[""]))
        code = replay_command([str(tape), "--depth", depth, *model, *given])
        return code, capsys.readouterr().err

    code, said = forward()
    assert (code, "adapter a cannot be loaded (--adapter a=PATH gives a path)" in said) == (2, True)
    code, said = forward("--adapter", f"a={folders['b']}")
    assert (code, "adapter a is not that of the tape: its digest is not" in said) == (2, True)
    right = ("--adapter", f"a={folders['a']}")
    code, said = forward(*right)
    version = version_of(read_files(str(folders["c"])).digest)
    assert code == 2
    assert f"request 1 had adapter late in version {version:016x}, which was loaded after" in said
    late = ("--adapter", f"late={folders['c']}")
    assert forward(*right, *late)[0] == 0
    assert forward(*right, *late, depth="reference")[0] == 0


def test_what_is_unloaded_is_let_go_of_once_no_request_has_it() -> None:
    store = Kept()
    shelf = Shelf(store)
    one, two = (shelf.load("a", path) for path in ("one", "two"))
    assert (shelf.retired, shelf.offered) == (True, {"a": two})
    shelf.sweep([Namespace(*one.key, salt="s"), Namespace()])
    assert (shelf.retired, store.kept) == (True, [])
    for old in (one.key, ("b", 1)):
        with pytest.raises(
            RequestRefused, match="was unloaded, or loaded anew, while this request"
        ):
            shelf.refuse(Namespace(*old))
    shelf.refuse(Namespace(*two.key, salt="s"))
    shelf.refuse(Namespace(salt="s"))
    shelf.unload("a")
    shelf.sweep([Namespace(*two.key)])
    assert (shelf.retired, store.kept) == (True, [{two.key}])
    shelf.sweep([])
    assert (shelf.retired, store.kept) == (False, [{two.key}, set()])
    assert shelf.load("a", "one").key == one.key
    assert not shelf.retired


class Kept(FakeAdapters):
    """Remembers what it was told to keep."""

    def __init__(self) -> None:
        self.kept: list[set[Key]] = []

    def keep(self, keys: Collection[Key]) -> None:
        self.kept.append(set(keys))


def test_a_start_with_an_adapter_that_is_not_there_ends_in_a_sentence(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with (
        pytest.raises(AdapterError, match=r"none/adapter_config.json cannot be read"),
        serving(folders[""], adapter=Texts((f"x={tmp_path / 'none'}",))),
    ):
        pass


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"adapter": "poems"}, "adapter must be NAME=PATH, not 'poems'"),
        ({"adapter": "a="}, "adapter must be NAME=PATH, not 'a='"),
        ({"adapter": ["a=x", "a=y"]}, "adapter a is given twice: give each its own name"),
        (
            {"model": "m/tiny", "adapter": "tiny=x"},
            "adapter must have another name than the model itself, 'tiny'",
        ),
        (
            {"adapter_loading": True},
            "adapter_loading lets clients name folders of this machine: give an api_key too",
        ),
    ],
)
def test_settings_of_adapters_that_make_no_sense_are_refused(
    flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(flags, {})
    assert str(error.value) == said


def test_adapters_are_given_in_toml_environment_and_repeated_flags(tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_text('adapter = ["a=/x", "b=/y"]\n')
    both = ("a=/x", "b=/y")
    assert load_settings({}, {}, str(file)).adapter == both
    assert load_settings({}, {"MLXTAPE_ADAPTER": "a=/x,b=/y"}).adapter == both
    assert load_settings({"adapter": ["a=/x", "b=/y"]}, {}).adapter == both
    assert Settings().adapter == ()
