"""The shipped config.pbtxt is the configuration: the same keys and values as EngineConfig, each explained."""

import dataclasses
import re
from pathlib import Path

from netra_backend.config import EngineConfig

MODEL = Path(__file__).resolve().parents[1] / "model_repository" / "netra"
ENTRY = re.compile(
    r'^parameters { key: "(\w+)" value { string_value: "([^"]*)" } }  # (\S.*)$', re.MULTILINE
)


def entries() -> dict[str, str]:
    text = (MODEL / "config.pbtxt").read_text()
    found = ENTRY.findall(text)
    assert len(found) == len({key for key, _, _ in found}), "a key is there twice"
    assert len(found) == text.count("parameters {"), "an entry is not `parameters ... # comment`"
    return {key: value for key, value, _ in found}


def test_every_knob_is_there_in_the_order_of_the_dataclass():
    assert list(entries()) == [field.name for field in dataclasses.fields(EngineConfig)]


def test_every_value_is_the_default():
    assert EngineConfig.from_parameters(entries()) == EngineConfig()


def test_the_model_file_is_one_import():
    lines = (MODEL / "1" / "model.py").read_text().splitlines()
    assert "from netra_backend.adapter import TritonPythonModel" in lines
