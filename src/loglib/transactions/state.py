"""State: the apps and generations after the entries up to a number, which decide if the next one may be committed.

Invariant: it is a function of the entries in their order. So all processes agree, from whichever checkpoint they began.
An app has one owner; the version of an app and the generation of a group's partition never fall.

Threads: the owner of a state serialises its calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import FencedError, FencedJobError, SourceMismatchError, StaleGenerationError
from .manifest import AppState, Checkpoint, Fence, GroupCommit, JobCommit, Manifest, Section

_MOST_FORMER = 1000  # owners that are remembered for each app


class Intent(NamedTuple):
    """A transaction to commit."""

    app: str
    version: int | None  # None: the next one
    owner: str
    source: str | None = None
    sections: tuple[Section, ...] = ()
    offsets: tuple[GroupCommit, ...] = ()
    frames: bytes = b""
    rows: int | None = None
    jobs: tuple[JobCommit, ...] = ()


class State:
    """The apps and generations after a number of entries."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.number = checkpoint.number
        self.apps = dict(checkpoint.apps)
        self.generations = dict(checkpoint.generations)

    def apply(self, manifest: Manifest) -> None:
        """Take the next entry."""
        app = manifest.app
        if app is not None:
            before = self.apps.get(app) or AppState(None, manifest.owner, (), None, 0, 0)
            former = before.former
            if before.owner != manifest.owner:
                former = (*former, before.owner)[-_MOST_FORMER:]
            self.apps[app] = AppState(
                before.version if manifest.version is None else manifest.version, manifest.owner, former,
                before.source if manifest.source is None else manifest.source, manifest.number, manifest.time,
                before.rows if manifest.version is None else manifest.rows,
            )  # fmt: skip
        for each in manifest.offsets:
            self._raise((each.topic, each.group, each.partition), each.generation)
        for fence in manifest.fences:
            self._raise(fence[:3], fence.generation)
        self.number = manifest.last_number

    def _raise(self, key: tuple[str, str, str], generation: int) -> None:
        self.generations[key] = max(generation, self.generations.get(key, 0))

    # --- may it be committed? ---------------------------------------------------------------------------

    def version_for(self, intent: Intent) -> int | None:
        """The version with which the intent may be committed now; None if this version is committed already.

        `FencedError`, `SourceMismatchError` or `StaleGenerationError` if it may not.
        """
        state = self.apps.get(intent.app)
        if state is not None and intent.owner != state.owner:
            raise FencedError(intent.app, intent.owner, state.owner)
        last = self._last_of(intent.app, intent.source)
        version = last + 1 if intent.version is None else intent.version
        if version <= last:
            return None
        for each in intent.offsets:
            if each.generation < self.generations.get((each.topic, each.group, each.partition), 0):
                raise StaleGenerationError(each.group, intent.owner, each.partition)
        for job in intent.jobs:
            if job.token < self.generations.get(job.fence, 0):
                by = "others have taken it back, because its lease was over, or its member was evicted"
                raise FencedJobError(job.share, job.partition, job.offset, job.token, by)
        return version

    def is_owner(self, app: str, owner: str, source: str | None) -> bool:
        """True if the app has this owner; False if the owner may take it over, else `FencedError`."""
        state = self.apps.get(app)
        self._last_of(app, source)
        if state is not None and owner in state.former and owner != state.owner:
            raise FencedError(app, owner, state.owner)
        return state is not None and state.owner == owner

    def unknown(self, fences: Iterable[Fence]) -> tuple[Fence, ...]:
        """The fences that raise a generation."""
        return tuple(each for each in fences if each.generation > self.generations.get(each[:3], 0))

    def _last_of(self, app: str, source: str | None) -> int:
        """The app's last version, -1 if it has none. `SourceMismatchError` if its versions have another source."""
        state = self.apps.get(app)
        if state is None:
            return -1
        if source is not None and state.source is not None and source != state.source:
            raise SourceMismatchError(app, source, state.source)
        return -1 if state.version is None else state.version

    def has(self, manifest: Manifest) -> bool:
        """True if this entry is the last one of its app. No two entries of an owner have the same number and time."""
        state = self.apps.get(manifest.app or "")
        entry = manifest.version, manifest.owner, manifest.number, manifest.time
        return state is not None and (state.version, state.owner, state.number, state.last_used) == entry
