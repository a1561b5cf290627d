"""A package that is missing: the error names the extra that has it, before anything is made."""

from pathlib import Path

import pytest

from conftest import QUIET, run_python
from loglib import Topic
from loglib.config.extras import how_to_install

CALLS = {
    "topic.arrow()": "arrow", "topic.to_pandas()": "arrow", "next(topic.batches()).to_arrow()": "arrow",
    "topic.append_arrow(None)": "arrow", "offload.archive(topic, 'archive')": "arrow",
    "offload.archive(topic, 'archive', delta=True)": "arrow",
}  # fmt: skip
PROGRAM = """
    import os, sys
    from loglib import Topic, offload
    sys.modules["pyarrow"] = None
    os.chdir(sys.argv[2])
    with Topic.open(sys.argv[2] + "/topic") as topic:
        topic.append(b"x", sync=True)
        try:
            eval(sys.argv[1])
        except ImportError as error:
            print(type(error).__name__, error)
    print(os.listdir("."))
"""


@pytest.mark.parametrize("call", CALLS)
def test_call_names_the_extra_that_it_needs_and_makes_nothing(call: str, tmp_path: Path) -> None:
    Topic.create(tmp_path / "topic", **QUIET).close()
    said, left = run_python(PROGRAM, call, tmp_path).splitlines()
    assert said == f"ModuleNotFoundError this needs pyarrow: pip install 'loglib-segments[{CALLS[call]}]'"
    assert left == "['topic']"


def test_error_about_something_else_is_left_alone() -> None:
    assert how_to_install(ModuleNotFoundError("no", name="something")) is None
    assert how_to_install(ImportError("no")) is None
    assert how_to_install(ModuleNotFoundError("no", name="pyarrow.fs")) == (
        "this needs pyarrow: pip install 'loglib-segments[arrow]'"
    )
