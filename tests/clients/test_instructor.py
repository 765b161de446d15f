"""instructor, as pip installs it: answers as objects of a class."""

from __future__ import annotations

import json
from pathlib import Path

from tests.real_server import Served

from .environments import bin_of, run_client

SCRIPT = """
import sys
from enum import Enum
import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

class Size(str, Enum):
    small = "small"
    large = "large"

class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=8)
    size: Size

url, model = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=url, api_key="x"), mode=instructor.Mode.JSON_SCHEMA
)
animal = client.chat.completions.create(
    model=model, response_model=Animal, max_retries=0, temperature=0, max_tokens=100,
    messages=[{"role": "user", "content": "Describe a dog."}],
)
print(animal.model_dump_json())
"""


def test_instructor_gets_an_object_of_its_class_at_the_first_try(
    served: Served, url: str, tmp_path: Path
) -> None:
    python = str(bin_of("instructor") / "python")
    animal = json.loads(run_client([python, "-c", SCRIPT, url, served.model], tmp_path))
    assert list(animal) == ["name", "legs", "size"]
    assert 0 <= animal["legs"] <= 8
    assert animal["size"] in ("small", "large")
