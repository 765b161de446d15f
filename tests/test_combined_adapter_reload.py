"""An adapter that is loaded anew in the middle of a request's admission refuses nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel.blas import load_blas

load_blas()  # before anything imports mlx

from server.submission import Sink, Submission  # noqa: E402
from server.values import Texts  # noqa: E402

from .lora import write_adapter  # noqa: E402
from .real_server import serving, tiny_folder  # noqa: E402


def test_a_request_whose_adapter_is_loaded_anew_as_it_comes_in_is_all_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_folder(tmp_path / "tiny")
    old, new = (write_adapter(tmp_path / it, model, n, scale=6.0) for n, it in enumerate("ab"))
    with serving(model, num_blocks=100, adapter=Texts((f"a={old}",))) as it:

        def texts() -> list[str]:
            body: dict[str, Any] = {"model": "a", "max_tokens": 8, "temperature": 0, "n": 2}
            answer = it.client.completions.create(prompt=["once", "upon"], **body)
            return [choice.text for choice in answer.choices]

        of_old, submit, came = texts(), it.engine.submit, list[int]()

        def overtaken(submission: Submission, sink: Sink) -> int:
            came.append(submission.namespace.version)
            if len(came) == 3:  # two answers of the first prompt are on their way
                it.engine.load_adapter("a", str(new))
            return submit(submission, sink)

        monkeypatch.setattr(it.engine, "submit", overtaken)
        got = texts()
        assert [came.count(version) for version in dict.fromkeys(came)] == [3, 4]
        assert got == texts() != of_old
        it.idle()
