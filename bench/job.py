"""Job: one measurement, as it is passed to the process that makes it.

Invariant: a job has only words and numbers, so it fits on a command line and prints well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

Option = int | str | bool


@dataclass(frozen=True, slots=True)
class Options:
    """A job's settings by name. Each is read with the type that it must have."""

    values: dict[str, Option]

    def text(self, name: str, default: str | None = None) -> str:
        return str(self.values[name] if default is None else self.values.get(name, default))

    def number(self, name: str, default: int | None = None) -> int:
        return int(self.values[name] if default is None else self.values.get(name, default))

    def flag(self, name: str) -> bool:
        return bool(self.values.get(name, False))


@dataclass(frozen=True, slots=True)
class Job:
    """The work to do (a name in worker.py) and its options."""

    kind: str
    options: dict[str, Option] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "options": self.options})

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(fields["kind"], fields["options"])
