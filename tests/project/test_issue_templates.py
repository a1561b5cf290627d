"""The forms for issues: each one asks for something by a name of its own, and names commands that exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from loglib.cli.program import _VERBS

yaml: Any = pytest.importorskip("yaml")
FORMS = sorted(each for each in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if each.name != "config.yml")
TYPES = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_form_asks_for_something_and_names_commands_that_exist(form: Path) -> None:
    text = form.read_text("utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    assert content["name"] and content["description"]
    asked = [each for each in content["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in content["body"]} <= TYPES
    assert len({each["id"] for each in asked}) == len(asked) and all(each["attributes"]["label"] for each in asked)
    assert any(each.get("validations", {}).get("required") for each in asked)
    assert set(re.findall(r"`loglib ([a-z][a-z-]*)", text)) <= set(_VERBS)
    for name in re.findall(r"\b[A-Z]+\.md\b", text):
        assert (ROOT / name).is_file()
