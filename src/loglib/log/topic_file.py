"""Topic file: the file `topic.json` of a topic, and how a topic is created.

Invariant: a directory that has a `topic.json` is a whole topic. It is built aside, all its files and
directories are synced, and then it is renamed into place. If several processes create it, one of them
wins and the others use its topic.

The file is JSON for people to read: format version, log id (a UUID, the salt of every checksum), and
the policies under their names in `Topic.open`. Readers ignore unknown names. The last value is a CRC of
the text before it, so that a flipped bit does not become another policy.

A change needs a new file, and a full disk has no room for it. But a smaller limit of retention is what makes room. So
beside `topic.json` there is a file `topic.json.spare` of one block, which says nothing. When the disk is full, the new
description is written over it, where it needs no more room, and it is renamed. The former file then is the spare one,
because a full disk may not take a new one. No reader ever opens the spare file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from ..config.policies import CODEC_NAMES, TopicConfig
from ..errors import CorruptLogError, LogError, LogMovedError, StorageFullError, UnsupportedFormatError
from ..format.codec import codec_id
from ..format.header import crc32c
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark, encode_new
from ..segment import HEADER_BYTES, Identity, create_segment, first_segment
from ..system.directory import Directory
from ..system.failures import is_full, refusing_full_disk
from ..system.files import Files
from ..system.process import importing

FORMAT = 3
NAME = "topic.json"
SPARE = f"{NAME}.spare"
_FORMER = f"{NAME}.spare.tmp"
MOST_BYTES = 1 << 20
_SPARE_BYTES = 4096  # a block of most file systems; a description has about 1200 bytes
_ASIDE_LETTERS = 40  # of the name: enough for a person to recognize the directory


class Stamp(NamedTuple):
    """Which file `topic.json` is."""

    inode: int
    size_bytes: int
    modified_s: float  # by the file system's clock


def partition_directory(path: str, number: int) -> str:
    return os.path.join(path, f"{number:04d}")


def exists(files: Files, path: str) -> bool:
    """True if the directory has a topic."""
    return files.exists(os.path.join(path, NAME))


def read_own(files: Files, path: str, log_id: bytes) -> TopicConfig | None:
    """The policies of this topic, or None if there is no topic; `LogMovedError` if another topic is there now."""
    described = read(files, path)
    if described is None:
        return None
    if described[0] != log_id:
        raise LogMovedError(path, "is another topic now")
    return described[1]


def read(files: Files, path: str) -> tuple[bytes, TopicConfig] | None:
    """The log id and policies in `topic.json`, or None if there is no topic yet."""
    name = os.path.join(path, NAME)
    try:
        content = files.read_whole(name, MOST_BYTES)
    except FileNotFoundError:
        return None
    says_how_many, log_id, config = _parse(name, content)
    beyond = partition_directory(path, config.partitions)
    if not says_how_many or _has_records(files, beyond):  # a number that is too small would hide records
        if files.read_whole(name, MOST_BYTES) != content:  # partitions were added meanwhile
            return read(files, path)
        _refuse_number(name, config, path)
    return log_id, config


def stamp(files: Files, path: str, name: str = NAME) -> Stamp | None:
    """Facts about `topic.json`, or another such file, that differ if another one has its place. None if there is none.

    The clock of a file system is coarse. So while a file is young, another one may follow it with the same facts.
    """
    try:
        facts = files.facts(os.path.join(path, name))
    except (LogError, OSError):
        return None
    return Stamp(facts.st_ino, facts.st_size, facts.st_mtime)


def read_existing(files: Files, path: str) -> tuple[bytes, TopicConfig]:
    """The log id and policies of a topic. `CorruptLogError` if `topic.json` is damaged or lost."""
    described = read(files, path)
    if described is None:
        raise CorruptLogError(os.path.join(path, NAME), 0, "no file", "the description of the topic")
    return described


def parse(name: str, content: bytes) -> tuple[bytes, TopicConfig]:
    """The log id and policies in the content of a `topic.json` that came from elsewhere; `name` is for messages."""
    says_how_many, log_id, config = _parse(name, content)
    if not says_how_many:
        _refuse_number(name, config, name)
    return log_id, config


def _refuse_number(name: str, config: TopicConfig, path: str) -> NoReturn:
    raise CorruptLogError(name, 0, f"{config.partitions} partitions", f"the number of those in {path}")


@lru_cache(maxsize=64)  # transactions look at it before each commit
def _parse(name: str, content: bytes) -> tuple[bool, bytes, TopicConfig]:
    """True if the file has the number of partitions; the log id; and the policies."""
    try:
        values = json.loads(content)
        if "crc" in values:
            _check_crc(name, content, values["crc"])
        version = values["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"format {version}")
        if version != FORMAT:
            raise UnsupportedFormatError(name, "topic format", version, FORMAT)
        if values.get("compression", "none") not in CODEC_NAMES:
            raise UnsupportedFormatError(name, "compression", values["compression"], ", ".join(CODEC_NAMES))
        log_id, config = _parse_id(values["log_id"]), TopicConfig.from_json(values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptLogError(name, 0, f"no valid description ({error!r})", "the JSON of a topic") from error
    return "partitions" in values, log_id, config


def _parse_id(text: str) -> bytes:
    """The 16 bytes of a UUID as text. `ValueError` if it is none."""
    log_id = bytes.fromhex(text.replace("-", ""))
    if len(log_id) != 16:
        raise ValueError(f"log_id {text!r} is no UUID")
    return log_id


def _has_records(files: Files, directory: str) -> bool:
    """True if the directory has more than an empty log. A crash in `add_partitions` leaves empty logs."""
    if not files.exists(directory):
        return False
    if not files.is_directory(directory):
        return True
    sizes = files.sizes(directory)
    return any(name.endswith(".log") and size > HEADER_BYTES for name, size in sizes.items())


def _check_crc(name: str, content: bytes, stated: str) -> None:
    before = content.rpartition(b'"crc"')[0]
    actual = f"{crc32c(before):08x}"
    if stated != actual:
        expected = f"{actual}, that of the text before it (remove the crc to edit the file by hand)"
        raise CorruptLogError(name, len(before), f"crc {stated}", expected)


def _uuid() -> Any:
    """The module, which takes a fifth of the time of `import loglib`. Only what makes or changes a topic needs it."""
    with importing:
        import uuid

    return uuid


def write(directory: Directory, log_id: bytes, config: TopicConfig) -> None:
    """Replace `topic.json`. Synced. `StorageFullError` if the disk is full, and the spare file does not help."""
    _check_stored(config)
    values = {"format": FORMAT, "log_id": str(_uuid().UUID(bytes=log_id))} | config.to_json()
    text = json.dumps(values, indent=2).removesuffix("\n}") + ",\n  "
    content = f'{text}"crc": "{crc32c(text.encode()):08x}"\n}}\n'.encode()
    try:
        directory.replace(NAME, content, config.permissions)
    except StorageFullError as refused:
        with suppress(OSError):  # the file that `replace` could not write
            directory.unlink(f"{NAME}.tmp")
        _write_over_spare(directory, content, config.permissions, refused)
    _keep_spare(directory, config.permissions)


def _write_over_spare(directory: Directory, content: bytes, permissions: int, refused: StorageFullError) -> None:
    """Replace `topic.json` by the spare file, whose block takes the content, and keep the former one. Synced.

    Raises `refused`, the error of a new file, if the spare file does not help.
    """
    files = directory.files
    try:
        if files.facts(SPARE, dir_fd=directory.fd).st_nlink > 1:
            raise refused
        with files.closing(directory.open_write(SPARE)) as fd:
            if stat.S_IMODE(files.fstat(fd).st_mode) != permissions:
                files.fchmod(fd, permissions)
            files.ftruncate(fd, files.write_all(fd, [content], 0))
            files.datasync(fd)
        with suppress(OSError):  # some file systems have no second names; then a new spare file is made, if it can be
            directory.link(NAME, _FORMER)
        directory.rename(SPARE, NAME)
        directory.sync()
    except OSError as error:
        if not is_full(error) and not isinstance(error, FileNotFoundError):
            raise
        raise refused from refused.__cause__


def _keep_spare(directory: Directory, permissions: int) -> None:
    """Keep or make a spare file. Handed to the system: without it, a full disk refuses a change.

    A file with several names (`cp -al`) belongs to a copy of the topic as well, where it may be `topic.json` one day.
    """
    files = directory.files
    with suppress(OSError):  # the change is made, and the next one tries again
        if directory.exists(_FORMER):
            directory.rename(_FORMER, SPARE)  # does nothing to two names of one file
        if directory.exists(_FORMER):
            directory.unlink(_FORMER)
        if directory.exists(SPARE):
            facts = files.facts(SPARE, dir_fd=directory.fd)
            if facts.st_size and facts.st_nlink == 1 and stat.S_IMODE(facts.st_mode) == permissions:
                return
            directory.unlink(SPARE)
        with files.closing(directory.create(SPARE, permissions)) as fd:
            files.write_all(fd, [bytes(_SPARE_BYTES)], 0)


def _check_stored(config: TopicConfig) -> None:
    """Refuse policies that would be read back differently, or not at all: the topic could not be opened again."""
    try:
        again = TopicConfig.from_json(json.loads(json.dumps(config.to_json())))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{config} cannot be stored: {error}") from error
    if again != config:
        raise ValueError(f"{config} cannot be stored: it would be read as {again}")


def create(files: Files, path: str, config: TopicConfig, *, now: int) -> None:
    """Build the whole topic aside and move it into place. Synced, including its name. A topic that is there stays."""
    names = files.sizes(path) if files.exists(path) else {}
    if NAME in names:  # another process was quicker
        return
    if names:
        raise LogError(f"{path} holds files but no {NAME}; a topic is made in a new or an empty directory")
    codec_id(config.compression)
    _check_stored(config)
    log_id = _uuid().uuid4().bytes
    aside = new_topic_aside(files, path, config.permissions)
    if put_in_place(files, aside, path, lambda: _build(files, aside, log_id, config, now=now)):
        files.sync_directory(os.path.dirname(path))


def new_topic_aside(files: Files, path: str, permissions: int) -> str:
    """A new name beside the path, for a topic that is built there. The directories above it are made.

    `LogError` if one of them is a topic: nothing would list a topic in there, and it would go with that one.
    """
    above = path
    while above != (above := os.path.dirname(above)):
        with suppress(PermissionError):
            if exists(files, above):
                raise LogError(f"{path} would be a part of the topic {above}")
    files.make_directories(os.path.dirname(path), permissions)
    return new_aside(files, path)


def new_aside(files: Files, path: str) -> str:
    """A new name beside the path, for a directory that is built or removed there. It is no name of a topic or a group.

    It is short, because some file systems take fewer letters than a name may have.
    """
    parent, name = os.path.split(path)
    while True:
        aside = os.path.join(parent, f".{name[:_ASIDE_LETTERS].lstrip('.')}.{files.random_bytes(8).hex()}.tmp")
        if not files.exists(aside):
            return aside


def put_in_place(files: Files, aside: str, path: str, build: Callable[[], object]) -> bool:
    """Build a whole directory aside and move it into place; the name is not yet synced.

    False if another process was quicker: then its directory stays.
    """
    try:
        with refusing_full_disk(path):
            build()
            files.rename(aside, path)
    except (OSError, LogError) as error:
        if files.exists(aside):  # if it does not exist, the error of removing it would hide this one
            files.remove_tree(aside)
        if isinstance(error, LogError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _build(files: Files, aside: str, log_id: bytes, config: TopicConfig, *, now: int) -> None:
    files.make_directory(aside, config.permissions)
    for number in range(config.partitions):
        directory = partition_directory(aside, number)
        make_partition(files, directory, Identity.of(log_id, number), now=now, permissions=config.permissions)
    with Directory.open(files, aside) as made:
        write(made, log_id, config)


def make_missing(
    directory: Directory, log_id: bytes, config: TopicConfig, numbers: Iterable[int], *, now: int
) -> None:  # fmt: skip
    """Make an empty log for each of these partitions that has no directory. Synced."""
    files = directory.files
    for number in numbers:
        place = partition_directory(directory.path, number)
        if not files.exists(place):
            aside = f"{place}.tmp"
            if files.exists(aside):
                files.remove_tree(aside)
            make_partition(files, aside, Identity.of(log_id, number), now=now, permissions=config.permissions)
            files.rename(aside, place)
    directory.sync()


def make_partition(files: Files, path: str, identity: Identity, *, now: int, permissions: int) -> None:
    """Make a directory with an empty log: a watermark and the first segment. Synced, except the directory's name."""
    files.make_directory(path, permissions)
    first = encode_new(Mark.at_rest(0), identity.salt)
    with Directory.open(files, path) as directory:
        directory.write_new(WATERMARK, first, permissions)
        files.close(create_segment(directory, first_segment(identity, created=now), permissions))
