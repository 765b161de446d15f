"""lm-eval, as pip installs it: a generation task and a multiple-choice task of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server import Engine
from tests.real_server import SMOLLM2, Served

from .environments import bin_of, run_client

PLACES = (("France", "Paris", "Rome"), ("Italy", "Rome", "Oslo"), ("Norway", "Oslo", "Paris"))
PROMPT = "The capital of {country} is"
CHOICE = {
    "task": "capitals",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "task": "say",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def samples(served: Served, url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval logged of each task, in the order of the documents."""
    documents = folder / "places.jsonl"
    lines = [{"country": country, "choices": list(choices)} for country, *choices in PLACES]
    documents.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for task in (CHOICE, GENERATION):
        text = json.dumps({**task, "dataset_kwargs": {"data_files": {"test": str(documents)}}})
        (folder / f"{task['task']}.yaml").write_text(text)  # JSON is YAML
    model = f"model={served.model},base_url={url}/completions,tokenizer_backend=remote"
    run_client(
        [
            *(str(bin_of("lm-eval") / "lm_eval"), "--model", "local-completions"),
            *("--model_args", f"{model},num_concurrent=2,max_retries=1"),
            *("--tasks", "capitals,say", "--include_path", str(folder)),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ],
        folder,
        HF_HOME=str(folder),
        HF_DATASETS_OFFLINE="1",
        OPENAI_API_KEY="x",
    )
    return {name: _samples(folder / "out", name) for name in ("capitals", "say")}


def _samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine.load(SMOLLM2, num_blocks=64) as local:
        yield local


def test_lm_evals_log_likelihoods_are_our_scores(
    samples: dict[str, list[dict[str, Any]]], engine: Engine
) -> None:
    assert len(samples["capitals"]) == len(PLACES)
    for sample, (country, *choices) in zip(samples["capitals"], PLACES, strict=True):
        found = [one[0] for one in sample["resps"]]
        ours = engine.score(PROMPT.format(country=country), [f" {it}" for it in choices])
        for (logprob, greedy), score in zip(found, ours, strict=True):
            assert float(logprob) == pytest.approx(score.logprob, abs=1e-3)
            assert str(greedy) == str(score.greedy)


def test_lm_eval_finds_the_right_capitals(samples: dict[str, list[dict[str, Any]]]) -> None:
    assert [sample["acc"] for sample in samples["capitals"]] == [1.0, 1.0, 1.0]


def test_lm_evals_generations_are_ours(
    samples: dict[str, list[dict[str, Any]]], engine: Engine
) -> None:
    for sample, (country, *_) in zip(samples["say"], PLACES, strict=True):
        prompt = PROMPT.format(country=country)
        ours = engine.generate(prompt, max_tokens=8, temperature=0, stop=["."])
        assert sample["resps"] == [[ours.text]]
